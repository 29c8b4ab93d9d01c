//! What a rank says of its GPUs and of the links that it uses, in the second half of its segment's header.
//!
//! Only its owner writes it. Readers take what makes sense and skip the rest: a row that is being changed, a
//! rate that no link has, a count that nobody reaches.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// GPUs that a rank lists.
pub const LINK_RATES: usize = 8;
/// Hops that a rank uses or has used.
pub const ROWS: usize = 96;
/// Hops that a rank has measured.
pub const LINES: usize = 64;

/// No link is faster, GB/s: a higher figure is not a rate.
const GB_S_MAX: f32 = 1e5;
/// No copy takes longer before its bytes move, us.
const ALPHA_US_MAX: f32 = 1e6;
/// The most pairs of GPUs that are possible.
const FLOWS_MAX: u32 = 4096;
/// Set in the word with the flows, if they give way to others.
const YIELDS: u32 = 1 << 31;

/// The two ends of a hop, in one word: for each GPU a name that is the same in all processes, 0 for the
/// host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ends(u64);

impl Ends {
    /// From one place to another; `None` is the host's memory.
    #[must_use]
    pub fn new(from: Option<&[u8; 16]>, to: Option<&[u8; 16]>) -> Ends {
        let half = |place: Option<&[u8; 16]>| u64::from(place.map_or(0, name));
        Ends(half(from) << 32 | half(to))
    }
}

/// A GPU's identity in 32 bits, never 0 (FNV-1a).
fn name(uuid: &[u8; 16]) -> u32 {
    let hash = uuid.iter().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    });
    hash.max(1)
}

/// Two small floats in a word.
fn pack(high: f32, low: u32) -> u64 {
    u64::from(high.to_bits()) << 32 | u64::from(low)
}

fn unpack(word: u64) -> (f32, u32) {
    (f32::from_bits((word >> 32) as u32), word as u32)
}

/// Owner: writes a word, unless it is there already.
fn put(word: &AtomicU64, value: u64, order: Ordering) {
    if word.load(Ordering::Relaxed) != value {
        word.store(value, order);
    }
}

/// A GPU that a rank uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostLinkRates {
    /// Identity.
    pub uuid: [u8; 16],
    /// PCI address: domain, bus, device and function, as `domain << 16 | bus << 8 | device << 3 | function`.
    pub pci: u64,
    /// NUMA node, if known.
    pub numa: Option<u32>,
}

#[derive(Debug)]
#[repr(C)]
struct HostLinkRateCells {
    uuid: [AtomicU64; 2],
    pci: AtomicU64,
    /// One more than the number; 0 if it is not known.
    numa: AtomicU64,
}

/// What a rank uses of a hop, by copies that give way to those of others or by copies that do not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Traffic {
    /// The hop.
    pub ends: Ends,
    /// By copies to and from staging beside direct ones.
    pub yields: bool,
    /// Pairs of GPUs whose messages go there now.
    pub flows: u32,
    /// What these use of it together, GB/s.
    pub gb_s: f32,
    /// Bytes of all messages that went there or are about to go, ever; wraps around.
    pub total: u64,
}

#[derive(Debug)]
#[repr(C)]
struct RowCells {
    ends: AtomicU64,
    /// Rate, flows, and whether they give way.
    load: AtomicU64,
    total: AtomicU64,
}

/// What copies over a hop take, by the engine of each end that was tried: alpha (us) and rate (GB/s).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// The hop.
    pub ends: Ends,
    /// By the engine of the source.
    pub push: Option<(f32, f32)>,
    /// By the engine of the destination.
    pub pull: Option<(f32, f32)>,
}

#[derive(Debug)]
#[repr(C)]
struct LineCells {
    ends: AtomicU64,
    push: AtomicU64,
    pull: AtomicU64,
}

/// The page as it lies in shared memory.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Page {
    link_rates_count: AtomicU32,
    lines: AtomicU32,
    /// Changes whenever a GPU is listed or a hop is published.
    updates: AtomicU64,
    /// Rows that were ever written; those behind are not read.
    used: AtomicU32,
    link_rates: [HostLinkRateCells; LINK_RATES],
    rows: [RowCells; ROWS],
    line: [LineCells; LINES],
}

super::map::shared!(Page);

const _: () = assert!(size_of::<Page>() <= 4608);

impl Page {
    /// The GPUs that the owner uses.
    pub fn link_rates(&self) -> impl Iterator<Item = HostLinkRates> + '_ {
        let count = self.link_rates_count.load(Ordering::Acquire) as usize;
        self.link_rates.iter().take(count).map(|cells| {
            let half = |at: usize| cells.uuid[at].load(Ordering::Relaxed);
            let numa = cells.numa.load(Ordering::Relaxed).checked_sub(1);
            HostLinkRates {
                uuid: (u128::from(half(0)) << 64 | u128::from(half(1))).to_be_bytes(),
                pci: cells.pci.load(Ordering::Relaxed),
                numa: numa.and_then(|numa| u32::try_from(numa).ok()),
            }
        })
    }

    /// What the owner uses of each hop, including idle hops that it has used.
    pub fn traffic(&self) -> impl Iterator<Item = Traffic> + '_ {
        let used = self.used.load(Ordering::SeqCst) as usize;
        self.rows.iter().take(used).filter_map(|cells| {
            let ends = cells.ends.load(Ordering::SeqCst);
            if ends == 0 {
                return None;
            }
            let (gb_s, low) = unpack(cells.load.load(Ordering::SeqCst));
            let flows = low & !YIELDS;
            let total = cells.total.load(Ordering::SeqCst);
            let is_one_row = cells.ends.load(Ordering::SeqCst) == ends;
            let makes_sense = (0.0..=GB_S_MAX).contains(&gb_s) && flows <= FLOWS_MAX;
            (is_one_row && makes_sense).then_some(Traffic {
                ends: Ends(ends),
                yields: low & YIELDS != 0,
                flows,
                gb_s,
                total,
            })
        })
    }

    /// What the owner has measured.
    pub fn measured(&self) -> impl Iterator<Item = Measured> + '_ {
        let count = self.lines.load(Ordering::Acquire) as usize;
        self.line.iter().take(count).map(|cells| {
            let line = |cell: &AtomicU64| {
                let (alpha, bits) = unpack(cell.load(Ordering::Acquire));
                let gb_s = f32::from_bits(bits);
                let makes_sense = (0.0..=ALPHA_US_MAX).contains(&alpha)
                    && gb_s.is_normal()
                    && (0.0..=GB_S_MAX).contains(&gb_s);
                makes_sense.then_some((alpha, gb_s))
            };
            Measured {
                ends: Ends(cells.ends.load(Ordering::Relaxed)),
                push: line(&cells.push),
                pull: line(&cells.pull),
            }
        })
    }

    /// Changes whenever [`Page::link_rates`] or [`Page::measured`] do, or what the owner says of links
    /// elsewhere.
    pub fn updates(&self) -> u64 {
        self.updates.load(Ordering::Acquire)
    }

    /// Owner: what it says of links elsewhere has changed.
    pub(super) fn touch(&self) {
        self.updates.fetch_add(1, Ordering::AcqRel);
    }

    /// Owner: lists a GPU, unless it is listed or there are too many.
    pub(super) fn list(&self, link_rates: &HostLinkRates) {
        let count = self.link_rates_count.load(Ordering::Relaxed) as usize;
        if count >= LINK_RATES || self.link_rates().any(|known| known.uuid == link_rates.uuid) {
            return;
        }
        let uuid = u128::from_be_bytes(link_rates.uuid);
        let cells = &self.link_rates[count];
        cells.uuid[0].store((uuid >> 64) as u64, Ordering::Relaxed);
        cells.uuid[1].store(uuid as u64, Ordering::Relaxed);
        cells.pci.store(link_rates.pci, Ordering::Relaxed);
        let numa = link_rates.numa.map_or(0, |numa| u64::from(numa) + 1);
        cells.numa.store(numa, Ordering::Relaxed);
        self.link_rates_count
            .store(count as u32 + 1, Ordering::Release);
        self.touch();
    }

    /// Owner: writes row `index`. A rank publishes its own row before it reads those of others. Of two ranks
    /// that do so at the same moment, at least one sees the other, because all of this is sequentially
    /// consistent.
    pub(super) fn write(&self, index: usize, traffic: &Traffic) {
        let Some(cells) = self.rows.get(index) else {
            return;
        };
        let (_, low) = unpack(cells.load.load(Ordering::Relaxed));
        let is_other = cells.ends.load(Ordering::Relaxed) != traffic.ends.0
            || (low & YIELDS != 0) != traffic.yields;
        if is_other {
            // Nobody may mistake the load of one hop for that of another.
            cells.ends.store(0, Ordering::SeqCst);
            cells.load.store(0, Ordering::SeqCst);
        }
        // That a hop is no longer used may be seen later: nobody waits for the lines that others have read.
        let order = if traffic.flows > 0 {
            Ordering::SeqCst
        } else {
            Ordering::Release
        };
        put(&cells.total, traffic.total, order);
        let yields = if traffic.yields { YIELDS } else { 0 };
        let load = pack(traffic.gb_s, traffic.flows | yields);
        put(&cells.load, load, order);
        if is_other {
            cells.ends.store(traffic.ends.0, Ordering::SeqCst);
        }
        let used = index as u32 + 1;
        if self.used.load(Ordering::Relaxed) < used {
            self.used.store(used, Ordering::SeqCst);
        }
    }

    /// Owner: publishes what a hop takes. Each hop is listed once; the last figures count. False if there is
    /// no room.
    pub(super) fn tell(&self, measured: &Measured) -> bool {
        let count = self.lines.load(Ordering::Relaxed) as usize;
        let mut known = self.line.iter().take(count);
        let at = known.position(|cells| cells.ends.load(Ordering::Relaxed) == measured.ends.0);
        let Some(cells) = self.line.get(at.unwrap_or(count)) else {
            return false;
        };
        let word =
            |line: Option<(f32, f32)>| line.map_or(0, |(alpha, gb_s)| pack(alpha, gb_s.to_bits()));
        cells.push.store(word(measured.push), Ordering::Release);
        cells.pull.store(word(measured.pull), Ordering::Release);
        cells.ends.store(measured.ends.0, Ordering::Relaxed);
        if at.is_none() {
            self.lines.store(count as u32 + 1, Ordering::Release);
        }
        self.touch();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Box<Page> {
        crate::node::map::fresh()
    }

    fn ends(from: u8, to: u8) -> Ends {
        Ends::new(Some(&[from; 16]), (to != 0).then_some(&[to; 16]))
    }

    #[test]
    fn what_is_written_is_read() {
        let page = page();
        let link_rates = HostLinkRates {
            uuid: std::array::from_fn(|at| at as u8),
            pci: 0x18 << 8,
            numa: Some(0),
        };
        let other = HostLinkRates {
            uuid: [9; 16],
            numa: None,
            ..link_rates
        };
        for link_rates in [&link_rates, &other, &link_rates] {
            page.list(link_rates);
        }
        assert!(page.link_rates().eq([link_rates, other]));
        let traffic = Traffic {
            ends: ends(1, 2),
            yields: true,
            flows: 3,
            gb_s: 48.5,
            total: u64::MAX,
        };
        page.write(5, &traffic);
        assert!(page.traffic().eq([traffic]));
        let line = Measured {
            ends: ends(1, 0),
            push: Some((2.5, 12.25)),
            pull: None,
        };
        assert!(page.tell(&line));
        let again = Measured {
            pull: Some((5.0, 11.0)),
            ..line
        };
        assert!(page.tell(&again));
        assert!(page.measured().eq([again]));
    }

    #[test]
    fn what_makes_no_sense_is_passed_over() {
        let page = page();
        for (index, (gb_s, flows)) in [
            (f32::NAN, 1),
            (f32::INFINITY, 1),
            (-1.0, 1),
            (2e5, 1),
            (1.0, 5000),
        ]
        .into_iter()
        .enumerate()
        {
            let traffic = Traffic {
                ends: ends(1, 2),
                yields: false,
                flows,
                gb_s,
                total: 0,
            };
            page.write(index, &traffic);
        }
        assert_eq!(page.traffic().count(), 0);
        for line in [
            (f32::NAN, 1.0),
            (-1.0, 1.0),
            (1.0, 0.0),
            (1.0, f32::NAN),
            (1.0, -3.0),
            (2e6, 1.0),
        ] {
            page.tell(&Measured {
                ends: ends(1, 2),
                push: Some(line),
                pull: None,
            });
            let read = page.measured().next().expect("listed");
            assert_eq!(read.push, None, "{line:?}");
        }
        // Counts beyond the end of a list.
        page.link_rates_count.store(u32::MAX, Ordering::Relaxed);
        page.used.store(u32::MAX, Ordering::Relaxed);
        page.lines.store(u32::MAX, Ordering::Relaxed);
        assert_eq!(
            (page.link_rates().count(), page.measured().count()),
            (LINK_RATES, LINES)
        );
        assert_eq!(page.traffic().count(), 0);
        page.list(&HostLinkRates {
            uuid: [1; 16],
            pci: 0,
            numa: None,
        });
        assert!(!page.tell(&Measured {
            ends: ends(3, 4),
            push: None,
            pull: None
        }));
    }

    #[test]
    fn lists_are_bounded() {
        let page = page();
        for gpu in 0..200 {
            page.list(&HostLinkRates {
                uuid: [gpu; 16],
                pci: 0,
                numa: None,
            });
            let told = page.tell(&Measured {
                ends: ends(gpu.wrapping_add(1), 0),
                push: Some((1.0, 1.0)),
                pull: None,
            });
            assert_eq!(told, usize::from(gpu) < LINES);
        }
        assert_eq!(
            (page.link_rates().count(), page.measured().count()),
            (LINK_RATES, LINES)
        );
    }
}
