//! Numbers for what cells are of: functions, protocols, ways through the node.

use std::collections::HashMap;

use anabranch_engine::trace::record;

use super::job::{Copy, Job, Rank};

/// So many names of a kind are told apart.
const NAMES: usize = 4000;

/// Names in the order in which they came. Number 0 is what is not known, or one too many.
pub struct Names {
    pub all: Vec<String>,
    numbers: HashMap<String, u16>,
}

impl Names {
    pub fn new() -> Names {
        Names {
            all: vec!["?".into()],
            numbers: HashMap::from([("?".into(), 0)]),
        }
    }

    /// The number of a name that came before.
    pub fn find(&self, name: &str) -> Option<u16> {
        self.numbers.get(name).copied()
    }

    pub fn number(&mut self, name: &str) -> u16 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        if self.all.len() >= NAMES {
            return 0;
        }
        let number = self.all.len() as u16;
        self.all.push(name.to_owned());
        self.numbers.insert(name.to_owned(), number);
        number
    }
}

/// The calls of a rank, to be found by their number.
struct Calls<'a> {
    calls: &'a [record::Call],
    /// By number, where the calls themselves are not: those of several threads are mixed.
    order: Option<Vec<u32>>,
    /// Numbers of the names of its functions.
    functions: Vec<u16>,
}

impl Calls<'_> {
    fn find(&self, number: u64) -> Option<u16> {
        let after = match &self.order {
            None => self.after(number),
            Some(order) => order.partition_point(|at| self.calls[*at as usize].number <= number),
        };
        let last = after.checked_sub(1)?;
        let last = self.order.as_ref().map_or(last, |it| it[last] as usize);
        let call = &self.calls[last];
        // Calls that are one record have the numbers from its own on.
        let is_it = number - call.number < u64::from(call.times.max(1));
        is_it.then(|| self.function(call))
    }

    /// How many calls have this number or a smaller one. They count up from the first: where each is a record, the place is known.
    fn after(&self, number: u64) -> usize {
        let first = self.calls.first().map_or(0, |call| call.number);
        let most = number.saturating_sub(first).saturating_add(1);
        let most =
            usize::try_from(most).map_or(self.calls.len(), |most| most.min(self.calls.len()));
        let is_there = |most: usize| self.calls[most - 1].number == number;
        if most > 0 && is_there(most) {
            return most;
        }
        self.calls[..most].partition_point(|call| call.number <= number)
    }

    fn function(&self, call: &record::Call) -> u16 {
        let number = self.functions.get(usize::from(call.function));
        number.copied().unwrap_or(0)
    }
}

/// The calls of all ranks.
pub struct Functions<'a> {
    ranks: HashMap<u32, Calls<'a>>,
    pub names: Names,
}

impl<'a> Functions<'a> {
    pub fn new(ranks: &'a [Rank]) -> Functions<'a> {
        let mut names = Names::new();
        let mut calls_of = |rank: &'a Rank| {
            // Of all that there are, those that were called.
            let mut functions = vec![0; rank.header.functions.len()];
            for call in &rank.calls {
                let at = usize::from(call.function);
                if functions.get(at) == Some(&0) {
                    functions[at] = names.number(&rank.header.functions[at]);
                }
            }
            let calls = &rank.calls[..];
            let order = (!calls.is_sorted_by_key(|call| call.number)).then(|| {
                let mut order: Vec<u32> = (0..calls.len() as u32).collect();
                order.sort_unstable_by_key(|at| calls[*at as usize].number);
                order
            });
            Calls {
                calls,
                order,
                functions,
            }
        };
        let ranks = ranks
            .iter()
            .map(|rank| (rank.header.rank, calls_of(rank)))
            .collect();
        Functions { ranks, names }
    }

    /// The function of a call.
    pub fn of(&self, rank: u32, call: &record::Call) -> u16 {
        self.ranks.get(&rank).map_or(0, |it| it.function(call))
    }

    /// The function of a call by its number.
    pub fn find(&self, rank: u32, number: u64) -> Option<u16> {
        self.ranks.get(&rank)?.find(number)
    }

    /// Whether this rank's file is there.
    pub fn has(&self, rank: u32) -> bool {
        self.ranks.contains_key(&rank)
    }
}

/// From one place to another, as a hop of a path. Places may not be told apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Link {
    pub from: Option<usize>,
    pub to: Option<usize>,
    pub path: &'static str,
    pub hop: u8,
}

/// The paths that a message took, and the places that it was at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Route {
    pub paths: Vec<&'static str>,
    /// None: they are not told apart.
    pub places: Option<Vec<usize>>,
}

impl Route {
    fn with(&self, link: &Link) -> Route {
        let mut route = self.clone();
        if !route.paths.contains(&link.path) {
            route.paths.push(link.path);
            route.paths.sort_unstable();
        }
        if let Some(places) = &mut route.places {
            places.extend(link.from.iter().chain(&link.to));
            places.sort_unstable();
            places.dedup();
        }
        route
    }
}

/// The links of all copies, and the routes of all messages.
pub struct Ways {
    pub links: Vec<Link>,
    pub routes: Vec<Route>,
    link_numbers: HashMap<Link, u16>,
    route_numbers: HashMap<Route, u16>,
    /// The route of each message; empty where there are no copies.
    of_messages: Vec<u16>,
    has_places: bool,
}

impl Ways {
    pub fn new(job: &Job, has_places: bool) -> Ways {
        let nowhere = Route {
            paths: Vec::new(),
            places: Some(Vec::new()),
        };
        let mut ways = Ways {
            links: Vec::new(),
            routes: vec![nowhere.clone()],
            link_numbers: HashMap::new(),
            route_numbers: HashMap::from([(nowhere, 0)]),
            of_messages: Vec::new(),
            has_places,
        };
        if job.copies.is_empty() {
            return ways;
        }
        ways.of_messages = vec![0; job.messages.len()];
        // Most messages have the routes of others: each step is computed once.
        let mut steps: HashMap<(u16, u16), u16> = HashMap::new();
        for copy in &job.copies {
            let link = ways.link(copy);
            let Some(at) = copy.message.filter(|at| *at < ways.of_messages.len()) else {
                continue;
            };
            let before = ways.of_messages[at];
            let step = steps.get(&(before, link)).copied();
            ways.of_messages[at] = step.unwrap_or_else(|| {
                let after = ways.routes[usize::from(before)].with(&ways.links[usize::from(link)]);
                let after = ways.route_number(after);
                steps.insert((before, link), after);
                after
            });
        }
        ways
    }

    fn route_number(&mut self, mut route: Route) -> u16 {
        let has_room = self.routes.len() < NAMES || self.route_numbers.contains_key(&route);
        if !self.has_places || !has_room {
            route.places = None;
        }
        let next = self.routes.len() as u16;
        let number = *self.route_numbers.entry(route.clone()).or_insert(next);
        if number == next {
            self.routes.push(route);
        }
        number
    }

    /// The link of a copy, as it is told from others.
    fn link_of(&self, copy: &Copy) -> Link {
        let link = Link {
            from: Some(copy.from),
            to: Some(copy.to),
            path: copy.path,
            hop: copy.hop,
        };
        let has_room = self.links.len() < NAMES || self.link_numbers.contains_key(&link);
        if self.has_places && has_room {
            return link;
        }
        Link {
            from: None,
            to: None,
            path: copy.path,
            // Few are left of these, however many hops a damaged record names.
            hop: copy.hop.min(7),
        }
    }

    /// The number of a copy's link that came before.
    pub fn find_link(&self, copy: &Copy) -> Option<u16> {
        self.link_numbers.get(&self.link_of(copy)).copied()
    }

    /// The number of a copy's link.
    pub fn link(&mut self, copy: &Copy) -> u16 {
        let link = self.link_of(copy);
        if let Some(number) = self.link_numbers.get(&link) {
            return *number;
        }
        let number = self.links.len() as u16;
        self.links.push(link.clone());
        self.link_numbers.insert(link, number);
        number
    }

    /// The number of a message's route.
    pub fn route(&self, message: usize) -> u16 {
        self.of_messages.get(message).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(number: u64, times: u32) -> record::Call {
        record::Call {
            number,
            function: 0,
            begin: 0,
            end: 0,
            comm: 0,
            peer: 0,
            tag: 0,
            count: 0,
            bytes: 0,
            times,
            inside: 0,
        }
    }

    #[test]
    fn calls_are_found_by_number() {
        let in_order = [call(1, 1), call(2, 3), call(6, 1)];
        let mixed = [call(1 << 32 | 1, 1), call(6, 1), call(2, 3), call(1, 1)];
        let order = Some(vec![3, 2, 1, 0]);
        for (calls, order) in [(&in_order[..], None), (&mixed[..], order)] {
            let calls = Calls {
                calls,
                order,
                functions: vec![9],
            };
            let found: Vec<u64> = (0..9).filter(|at| calls.find(*at).is_some()).collect();
            assert_eq!(found, [1, 2, 3, 4, 6]);
        }
    }

    #[test]
    fn names_beyond_the_bound_are_unknown() {
        let mut names = Names::new();
        for at in 0..NAMES + 5 {
            names.number(&at.to_string());
        }
        assert_eq!(names.all.len(), NAMES);
        assert_eq!((names.number("0"), names.number("?")), (1, 0));
        assert_eq!(names.number("one more"), 0);
    }
}
