//! Copies, their messages, and the places between which they were made.

use std::collections::HashMap;

use anabranch_engine::trace::record::{self, By, Way};

use super::job::{Copy, Place, Plan};
use super::message::OfIds;
use super::read::Read;

/// Numbers of places: by rank (its place among those read) and the number in its file.
pub struct Numbers(HashMap<(usize, u16), usize>);

/// The GPUs and host memories of a job.
pub fn places(read: &[Read]) -> (Vec<Place>, Numbers) {
    let mut places: Vec<Place> = Vec::new();
    let mut numbers = HashMap::new();
    let mut add = |key: (usize, u16), place: Place| {
        let is_same = |known: &Place| (&known.host, &known.uuid) == (&place.host, &place.uuid);
        let found = places.iter().position(is_same);
        let number = found.unwrap_or(places.len());
        match found {
            // A rank that does not see a GPU knows only its UUID.
            Some(at) if places[at].pci.is_empty() && !place.pci.is_empty() => places[at] = place,
            Some(_) => {}
            None => places.push(place),
        }
        numbers.insert(key, number);
    };
    for (rank, one) in read.iter().enumerate() {
        let host = &one.rank.header.host;
        let memory = |place: &record::Place| Place {
            host: host.clone(),
            name: match place.ordinal {
                -1 => format!("GPU {:02x}{:02x}..", place.uuid[0], place.uuid[1]),
                ordinal => format!("GPU {ordinal}"),
            },
            uuid: uuid(&place.uuid),
            pci: pci(place.pci),
            numa: place.numa,
        };
        for place in &one.places {
            add((rank, place.number), memory(place));
        }
        if !one.copies.is_empty() {
            let host_memory = Place {
                host: host.clone(),
                name: "host memory".into(),
                uuid: String::new(),
                pci: String::new(),
                numa: -1,
            };
            add((rank, 0), host_memory);
        }
    }
    name_apart(&mut places);
    (places, Numbers(numbers))
}

/// Processes that see one GPU each call all of them GPU 0.
fn name_apart(places: &mut [Place]) {
    let names: Vec<(String, String)> = places
        .iter()
        .map(|place| (place.host.clone(), place.name.clone()))
        .collect();
    for (at, place) in places.iter_mut().enumerate() {
        let same = names.iter().filter(|name| **name == names[at]).count();
        if same > 1 && !place.pci.is_empty() {
            place.name = format!("GPU at {}", place.pci);
        }
    }
}

fn uuid(bytes: &[u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
}

fn pci(number: u64) -> String {
    if number == 0 {
        return String::new();
    }
    let (domain, bus) = (number >> 16, number >> 8 & 255);
    let (device, function) = (number >> 3 & 31, number & 7);
    format!("{domain:04x}:{bus:02x}:{device:02x}.{function}")
}

/// Copies and plans, each with its message.
pub fn of_messages(
    read: &mut [Read],
    of_ids: &OfIds,
    numbers: &Numbers,
) -> (Vec<Copy>, HashMap<usize, Plan>) {
    let (mut copies, mut plans) = (Vec::new(), HashMap::new());
    for (rank, one) in read.iter_mut().enumerate() {
        let place = |number: u16| numbers.0.get(&(rank, number)).copied();
        for copied in std::mem::take(&mut one.copies) {
            let (Some(from), Some(to)) = (place(copied.from), place(copied.to)) else {
                continue;
            };
            copies.push(Copy {
                message: of_ids.get(rank, copied.message),
                rank: one.rank.header.rank,
                path: match copied.way {
                    Way::Direct => "direct",
                    Way::Relay => "relay",
                    Way::Host => "host",
                },
                hop: copied.hop,
                chunk: 0,
                from,
                to,
                bytes: copied.bytes,
                launched_ns: copied.launched,
                end_ns: copied.end,
                uncertain_ns: copied.uncertain,
                by: match copied.by {
                    By::Stream => "stream",
                    By::Batch => "batch",
                    By::Graph => "graph",
                    By::Cpu => "cpu",
                },
            });
        }
        for planned in std::mem::take(&mut one.plans) {
            if let Some(message) = of_ids.get(rank, planned.message) {
                let [direct_bytes, relay_bytes, host_bytes] = planned.bytes;
                let plan = Plan {
                    predicted_us: planned.predicted_ns as f64 * 1e-3,
                    direct_bytes,
                    relay_bytes,
                    host_bytes,
                };
                plans.insert(message, plan);
            }
        }
    }
    copies.sort_by_key(|copy| {
        (
            copy.message,
            copy.path,
            copy.hop,
            copy.from,
            copy.launched_ns,
        )
    });
    let mut chunk = 0;
    for at in 1..copies.len() {
        let key = |copy: &Copy| (copy.message, copy.path, copy.hop, copy.from, copy.to);
        let is_next = copies[at].message.is_some() && key(&copies[at]) == key(&copies[at - 1]);
        chunk = if is_next { chunk + 1 } else { 0 };
        copies[at].chunk = chunk;
    }
    copies.sort_by_key(|copy| copy.launched_ns);
    (copies, plans)
}
