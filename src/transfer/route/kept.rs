//! What ranks measure in passing is kept for the next run, and what earlier runs kept is used: see
//! [`crate::model::links`].

use std::path::PathBuf;
use std::time::SystemTime;

use super::source;
use crate::config::Keep;
use crate::cuda::nvml::pci_number;
use crate::cuda::{self, reach, uuid_text, Uuid};
use crate::model::cache::{driver_text, folder};
use crate::model::links::{self, Links, LinksError, Wired};
use crate::model::Line;
use crate::node::Wiring;
use crate::transfer::Env;

/// The PCI address of a GPU; none if the driver does not tell it.
pub(super) fn pci_of(uuid: &Uuid) -> Option<u64> {
    let device = reach::by_uuid(uuid)?.device;
    pci_number(&cuda::pci_address(device)?)
}

/// What is kept of one GPU.
struct Row {
    uuid: Uuid,
    links: Links,
    /// It is not in its file yet.
    is_new: bool,
}

/// What is kept of the GPUs that this rank sees.
#[derive(Default)]
pub(super) struct KeptLinks {
    rows: Vec<Row>,
}

impl KeptLinks {
    /// What is kept of a GPU, or was found out since; `None` if nothing is to be kept.
    fn of(&mut self, env: &Env, uuid: &Uuid) -> Option<&mut Row> {
        let folder = place(env)?;
        if let Some(at) = self.rows.iter().position(|row| row.uuid == *uuid) {
            return Some(&mut self.rows[at]);
        }
        let (driver, pci, now_s) = (driver(), pci_of(uuid)?, now_s());
        let links = match links::load(&folder, &uuid_text(uuid), &driver, pci, now_s) {
            Ok(links) => {
                log::info!("links of {} are known from a run before", uuid_text(uuid));
                links
            }
            Err(why) => {
                // GPUs of other ranks are reported by those who use them.
                tell(&why, self.rows.is_empty());
                Links::new(&driver, pci, now_s)
            }
        };
        self.rows.push(Row {
            uuid: *uuid,
            links,
            is_new: false,
        });
        self.rows.last_mut()
    }

    /// What is known of a GPU.
    pub fn get(&mut self, env: &Env, uuid: &Uuid) -> Option<&Links> {
        self.of(env, uuid).map(|row| &row.links)
    }

    /// The links of all GPUs that this rank sees, if they are known.
    pub fn wiring(&mut self, env: &Env) -> Option<Vec<(Uuid, Wiring)>> {
        let devices = reach::devices().iter();
        let row = |uuid: Uuid| {
            let pci = pci_of(&uuid)?;
            let wired = self.get(env, &uuid)?.wired.clone()?;
            let wiring = Wiring {
                pci,
                is_switched: wired.is_switched,
                link_gb_s: wired.link_gb_s,
                to: wired.to,
                apart: wired.apart,
            };
            Some((uuid, wiring))
        };
        devices.map(|device| device.uuid).map(row).collect()
    }

    /// The system has told of the links of a GPU.
    pub fn note_wiring(&mut self, env: &Env, uuid: &Uuid, wiring: &Wiring) {
        let wired = Some(Wired {
            is_switched: wiring.is_switched,
            link_gb_s: wiring.link_gb_s,
            to: wiring.to.clone(),
            apart: wiring.apart.clone(),
        });
        self.note(env, uuid, |links| links.wired = wired);
    }

    /// The path from a GPU to host memory was measured, or the path back.
    pub fn note_host(&mut self, env: &Env, uuid: &Uuid, is_up: bool, line: Line) {
        self.note(env, uuid, |links| match is_up {
            true => links.to_host = Some(line.into()),
            false => links.from_host = Some(line.into()),
        });
    }

    /// The path from one GPU to another was measured well.
    pub fn note_pull(&mut self, env: &Env, [from, to]: &[Uuid; 2], line: Line) {
        let from = uuid_text(from);
        self.note(env, to, |links| links.note_pull(&from, line.into()));
    }

    fn note(&mut self, env: &Env, uuid: &Uuid, change: impl FnOnce(&mut Links)) {
        if let Some(row) = self.of(env, uuid) {
            change(&mut row.links);
            row.is_new = true;
        }
    }

    /// Writes what is new. Other ranks may have written about the same GPUs meanwhile.
    pub fn store(&mut self, env: &Env) {
        let Some(folder) = place(env) else { return };
        let (driver, now_s) = (driver(), now_s());
        for row in self.rows.iter_mut().filter(|row| row.is_new) {
            let (gpu, Some(pci)) = (uuid_text(&row.uuid), pci_of(&row.uuid)) else {
                continue;
            };
            row.is_new = false;
            // This rank only sees the GPU. Whoever uses it knows more, and may be writing it now.
            let is_used = row.links.to_host.is_some() || !row.links.pulls.is_empty();
            let known = links::load(&folder, &gpu, &driver, pci, now_s);
            let is_absent = !is_used && matches!(known, Err(LinksError::Absent(_)));
            if let Ok(known) = known {
                row.links.fill_from(known);
            }
            if let Err(why) = links::store(&folder, &gpu, &row.links, is_absent) {
                log::info!("{why}");
            }
        }
    }
}

/// Where links are kept, if they are. A simulated node's links are known without measuring, and may differ
/// tomorrow.
fn place(env: &Env) -> Option<PathBuf> {
    let keeps = match env.config.keep {
        Keep::Auto => !cuda::is_simulated(),
        Keep::On => true,
        Keep::Off => false,
    };
    folder().filter(|_| keeps)
}

fn driver() -> String {
    driver_text(cuda::version(), cuda::is_simulated())
}

fn now_s() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// It is no fault if nothing is kept yet, or if what was kept is for another driver.
fn tell(why: &LinksError, is_own: bool) {
    match why {
        LinksError::Unusable(..) if is_own => log::warn!("{why}"),
        _ => log::info!("links are measured while the program runs: {why}"),
    }
}

/// Identities of the GPUs from which the path to this GPU is known, with their lines.
pub(super) fn pulls(links: &Links) -> impl Iterator<Item = (Uuid, Line)> + '_ {
    let pulls = links.pulls.iter();
    pulls.filter_map(|pull| Some((source::uuid(&pull.from)?, pull.way.into())))
}
