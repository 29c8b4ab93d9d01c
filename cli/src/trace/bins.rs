//! What a page can hold of a job of any length: sums of its messages, copies and calls by bins of time, sizes by powers of two,
//! ranks, functions, protocols and routes. Where there are too many sums, bins of time become wider, and then ranks are
//! taken together.

use rustc_hash::FxHashMap;

/// Bins of time, at most.
pub const BINS: u64 = 200;
/// Nothing says which rank it is.
pub const UNKNOWN: u32 = u32::MAX;
/// Time is not divided into fewer bins while there are many ranks, and ranks not into fewer groups.
const BINS_KEPT: u64 = 25;
const GROUPS_KEPT: u32 = 16;

/// The class of a number of bytes: 0 has none, and class n those from 2^(n-1) on.
pub fn size_class(bytes: u64) -> u8 {
    (u64::BITS - bytes.leading_zeros()) as u8
}

/// What a sum is of. Sums that belong together are beside each other in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Ranks, or groups of them; [`UNKNOWN`].
    pub from: u32,
    pub to: u32,
    /// Numbers of names.
    pub call: u16,
    pub protocol: u16,
    pub route: u16,
    /// For copies.
    pub link: u16,
    pub size: u8,
    pub bin: u8,
}

impl Key {
    /// Of a call: its rank and its function.
    pub fn of_call(rank: u32, function: u16) -> Key {
        Key {
            from: rank,
            to: UNKNOWN,
            call: function,
            protocol: 0,
            route: 0,
            link: 0,
            size: 0,
            bin: 0,
        }
    }
}

/// A sum.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// What began in this bin, and its bytes.
    pub count: u64,
    pub bytes: u64,
    /// Of these, how many came to an end, the time that they took together and the longest of them, ns.
    pub timed: u64,
    pub ns: u64,
    pub longest_ns: u64,
    /// The one that took longest, or the first.
    pub example: usize,
    /// Time under way within the bin, ns, but for that of what was under way when it began; and how many more are under way
    /// at its end than were then.
    pub own_ns: i64,
    pub net: i64,
}

impl Cell {
    /// Takes another cell in. An example stays until a longer one comes.
    fn add(&mut self, other: &Cell) {
        if self.count == 0 || other.longest_ns > self.longest_ns {
            self.example = other.example;
        }
        self.count += other.count;
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.timed += other.timed;
        self.ns = self.ns.saturating_add(other.ns);
        self.longest_ns = self.longest_ns.max(other.longest_ns);
        self.own_ns = self.own_ns.saturating_add(other.own_ns);
        self.net += other.net;
    }
}

/// What is added.
pub struct Item {
    /// But for the bin.
    pub key: Key,
    /// Calls of MPI_Test that are one record count each.
    pub count: u64,
    pub bytes: u64,
    pub begin_ns: u64,
    /// None: it was under way until the end.
    pub end_ns: Option<u64>,
    /// The time that counts as its own.
    pub took_ns: Option<u64>,
    /// What an example is named by.
    pub number: usize,
}

/// How time and ranks are divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Width of a bin.
    pub width_ns: u64,
    /// The last time that there is.
    pub span_ns: u64,
    /// So many ranks, by 2 to this power, are one group.
    pub shift: u32,
    /// The highest rank.
    rank_max: u32,
}

impl Grid {
    pub fn new(span_ns: u64, rank_max: u32) -> Grid {
        // Damaged records may have any time; a width can still be doubled.
        let span_ns = span_ns.min(u64::MAX / 4);
        Grid {
            width_ns: span_ns / BINS + 1,
            span_ns,
            shift: 0,
            rank_max,
        }
    }

    /// Bins that have a width.
    pub fn bins(&self) -> u64 {
        self.span_ns / self.width_ns + 1
    }

    pub fn groups(&self) -> u32 {
        (self.rank_max >> self.shift) + 1
    }

    fn bin(&self, at_ns: u64) -> u8 {
        (at_ns.min(self.span_ns) / self.width_ns) as u8
    }

    /// From a time to the end of its bin.
    fn rest_ns(&self, at_ns: u64) -> i64 {
        let at_ns = at_ns.min(self.span_ns);
        i64::try_from(self.width_ns - at_ns % self.width_ns).unwrap_or(i64::MAX)
    }

    fn group(&self, rank: u32) -> u32 {
        match rank {
            UNKNOWN => UNKNOWN,
            rank => rank >> self.shift,
        }
    }
}

/// Sums of one kind.
#[derive(Default)]
pub struct Cells {
    pub by_key: FxHashMap<Key, Cell>,
    /// So many may be there.
    most: usize,
}

impl Cells {
    /// In the order of their keys.
    pub fn sorted(&self) -> Vec<(&Key, &Cell)> {
        let mut all: Vec<_> = self.by_key.iter().collect();
        all.sort_unstable_by_key(|(key, _)| **key);
        all
    }

    fn put(&mut self, grid: &Grid, item: &Item) {
        let key = Key {
            from: grid.group(item.key.from),
            to: grid.group(item.key.to),
            bin: grid.bin(item.begin_ns),
            ..item.key
        };
        let end_ns = item.end_ns.map(|end| end.max(item.begin_ns));
        let last = end_ns.map(|end| (grid.bin(end), -grid.rest_ns(end)));
        let (mut own_ns, mut net) = (grid.rest_ns(item.begin_ns), 1);
        if let Some((_, rest)) = last.filter(|(bin, _)| *bin == key.bin) {
            (own_ns, net) = (own_ns + rest, 0);
        }
        self.by_key.entry(key).or_default().add(&Cell {
            count: item.count,
            bytes: item.bytes,
            timed: item.took_ns.map_or(0, |_| item.count),
            ns: item.took_ns.unwrap_or(0),
            longest_ns: item.took_ns.unwrap_or(0),
            example: item.number,
            own_ns,
            net,
        });
        if let Some((bin, own_ns)) = last.filter(|(bin, _)| *bin != key.bin) {
            let cell = self.by_key.entry(Key { bin, ..key }).or_default();
            cell.own_ns = cell.own_ns.saturating_add(own_ns);
            cell.net -= 1;
        }
    }

    /// Every cell goes where its new key says.
    fn move_all(&mut self, new: impl Fn(&Key, &mut Cell) -> Key) {
        // In order, so that the same job gives the same page.
        let mut cells: Vec<_> = std::mem::take(&mut self.by_key).into_iter().collect();
        cells.sort_unstable_by_key(|(key, _)| *key);
        for (key, mut cell) in cells {
            let key = new(&key, &mut cell);
            self.by_key.entry(key).or_default().add(&cell);
        }
    }
}

/// The sums of a job.
pub struct Cube {
    pub grid: Grid,
    pub messages: Cells,
    pub copies: Cells,
    pub calls: Cells,
}

/// Which sums.
#[derive(Clone, Copy)]
pub enum Kind {
    Messages,
    Copies,
    Calls,
}

impl Cube {
    /// With so many cells of each kind at most.
    pub fn new(grid: Grid, [messages, copies, calls]: [usize; 3]) -> Cube {
        let cells = |most| Cells {
            most,
            ..Cells::default()
        };
        Cube {
            grid,
            messages: cells(messages),
            copies: cells(copies),
            calls: cells(calls),
        }
    }

    pub fn add(&mut self, kind: Kind, item: &Item) {
        let cells = match kind {
            Kind::Messages => &mut self.messages,
            Kind::Copies => &mut self.copies,
            Kind::Calls => &mut self.calls,
        };
        cells.put(&self.grid, item);
        if cells.by_key.len() > cells.most {
            while self.is_full() && self.coarsen() {}
        }
    }

    /// There are more cells than there may be.
    pub fn is_full(&self) -> bool {
        [&self.messages, &self.copies, &self.calls]
            .iter()
            .any(|cells| cells.by_key.len() > cells.most)
    }

    /// Makes bins of time twice as wide, or takes twice as many ranks together. False: there is only one of each.
    pub fn coarsen(&mut self) -> bool {
        let (bins, groups) = (self.grid.bins(), self.grid.groups());
        let is_wider = bins > BINS_KEPT || (groups <= GROUPS_KEPT && bins > 1);
        if !is_wider && groups == 1 {
            return false;
        }
        let width = i64::try_from(self.grid.width_ns).unwrap_or(i64::MAX);
        for cells in [&mut self.messages, &mut self.copies, &mut self.calls] {
            cells.move_all(|key, cell| match is_wider {
                true => {
                    if key.bin % 2 == 0 {
                        // What is more in the first half is under way in all of the second.
                        let on = cell.net.saturating_mul(width);
                        cell.own_ns = cell.own_ns.saturating_add(on);
                    }
                    let bin = key.bin / 2;
                    Key { bin, ..*key }
                }
                false => {
                    let half = |rank| if rank == UNKNOWN { rank } else { rank >> 1 };
                    let (from, to) = (half(key.from), half(key.to));
                    Key { from, to, ..*key }
                }
            });
        }
        match is_wider {
            true => self.grid.width_ns = self.grid.width_ns.saturating_mul(2),
            false => self.grid.shift += 1,
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that look random, and are the same in every run.
    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % bound
        }
    }

    fn item(from: u32, to: u32, (begin, end): (u64, Option<u64>), bytes: u64) -> Item {
        Item {
            key: Key {
                to,
                size: size_class(bytes),
                ..Key::of_call(from, 0)
            },
            count: 1,
            bytes,
            begin_ns: begin,
            end_ns: end,
            took_ns: end.map(|end| end - begin),
            number: begin as usize,
        }
    }

    /// Time under way in each bin, as the page computes it.
    fn under_way(cube: &Cube) -> Vec<i64> {
        let bins = cube.grid.bins() as usize;
        let (mut own, mut net) = (vec![0; bins], vec![0; bins]);
        for (key, cell) in &cube.messages.by_key {
            own[usize::from(key.bin)] += cell.own_ns;
            net[usize::from(key.bin)] += cell.net;
        }
        let mut before = 0;
        for bin in 0..bins {
            own[bin] += before * cube.grid.width_ns as i64;
            before += net[bin];
        }
        own
    }

    #[test]
    fn sizes_are_classed_by_powers_of_two() {
        let classes = [0, 1, 2, 3, 4, 1023, 1024, u64::MAX].map(size_class);
        assert_eq!(classes, [0, 1, 2, 2, 3, 10, 11, 64]);
    }

    #[test]
    fn sums_stay_the_same_however_coarse() {
        let mut numbers = Numbers(1);
        let span = 1_000_000;
        let mut cube = Cube::new(Grid::new(span, 63), [usize::MAX; 3]);
        let mut all = (0, 0, 0, 0);
        for number in 0..5000_u64 {
            let begin = numbers.below(span);
            let end = (number % 10 > 0).then(|| (begin + numbers.below(40_000)).min(span));
            let bytes = numbers.below(1 << 20);
            let (from, to) = (numbers.below(64) as u32, numbers.below(64) as u32);
            cube.add(Kind::Messages, &item(from, to, (begin, end), bytes));
            let took = end.map_or(0, |end| end - begin);
            all = (all.0 + 1, all.1 + bytes, all.2 + took, all.3.max(took));
        }
        let sums = |cube: &Cube| {
            cube.messages.by_key.values().fold((0, 0, 0, 0), |sum, it| {
                (
                    sum.0 + it.count,
                    sum.1 + it.bytes,
                    sum.2 + it.ns,
                    sum.3.max(it.longest_ns),
                )
            })
        };
        assert_eq!((sums(&cube), cube.grid.bins()), (all, 200));
        let mut fine = under_way(&cube);
        loop {
            let bins = fine.len();
            if !cube.coarsen() {
                break;
            }
            assert_eq!(sums(&cube), all);
            let coarse = under_way(&cube);
            if coarse.len() == bins {
                assert_eq!(
                    coarse, fine,
                    "ranks are taken together, and time is as before"
                );
            } else {
                let pairs: Vec<i64> = fine.chunks(2).map(|two| two.iter().sum()).collect();
                // The last bin may be cut off: beyond the end nothing is seen.
                assert_eq!(coarse[..bins / 2], pairs[..bins / 2], "{bins}");
            }
            fine = coarse;
        }
        assert_eq!((cube.grid.bins(), cube.grid.groups()), (1, 1));
        // From all pairs one is left, for each class of sizes.
        assert!(cube.messages.by_key.len() <= 21);
    }

    #[test]
    fn what_is_under_way_is_known_in_every_bin() {
        // 200 bins of 10 ns.
        let mut cube = Cube::new(Grid::new(1999, 1), [100; 3]);
        cube.add(Kind::Messages, &item(0, 1, (5, Some(32)), 1));
        cube.add(Kind::Messages, &item(0, 1, (12, Some(14)), 1));
        cube.add(Kind::Messages, &item(1, 0, (1985, None), 1));
        let busy = under_way(&cube);
        assert_eq!(busy[..5], [5, 12, 10, 2, 0]);
        assert_eq!(busy[197..], [0, 5, 10]);
        assert_eq!(busy.iter().sum::<i64>(), 27 + 2 + 15);
    }

    #[test]
    fn the_longest_is_the_example() {
        let mut cube = Cube::new(Grid::new(199, 1), [1; 3]);
        for (begin, end) in [(0, Some(1)), (1, Some(9)), (2, Some(4)), (3, None)] {
            cube.add(Kind::Messages, &item(0, 1, (begin, end), 64));
        }
        let cells = cube.messages.sorted();
        assert_eq!(cells.len(), 1);
        assert_eq!((cells[0].1.example, cells[0].1.timed), (1, 3));
    }

    #[test]
    fn cells_are_bounded_for_any_number_of_messages() {
        let mut numbers = Numbers(7);
        let span = 3_000_000_000;
        let most = [16_000, 12_000, 12_000];
        let mut cube = Cube::new(Grid::new(span, 4095), most);
        for _ in 0..1_000_000 {
            let (from, to) = (numbers.below(4096) as u32, numbers.below(4096) as u32);
            let begin = numbers.below(span);
            let end = Some((begin + numbers.below(100_000)).min(span));
            let bytes = 1 << numbers.below(24);
            cube.add(Kind::Messages, &item(from, to, (begin, end), bytes));
            cube.add(Kind::Calls, &item(from, UNKNOWN, (begin, end), 0));
        }
        assert!(!cube.is_full());
        let count: u64 = cube.messages.by_key.values().map(|cell| cell.count).sum();
        assert_eq!(count, 1_000_000);
        assert!(cube.messages.by_key.len() > 500, "it is not too coarse");
    }

    #[test]
    fn numbers_that_cannot_be_do_no_harm() {
        let mut cube = Cube::new(Grid::new(u64::MAX, UNKNOWN - 1), [4; 3]);
        for from in 0..64 {
            let times = (u64::from(from) << 58, Some(u64::MAX));
            let item = item(from << 26, UNKNOWN, times, u64::MAX);
            cube.add(Kind::Messages, &item);
        }
        assert!(!cube.is_full());
    }
}
