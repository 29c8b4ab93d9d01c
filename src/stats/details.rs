//! What a rank says of its calls and messages beyond its counters: as words, by which it comes to the rank that
//! writes the file, and as JSON.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{json, Map, Value};

use super::calls::{self, Calls};
use super::meter::{self, class_from, Counted, Pair, Rate, SentBy, Sum};
use super::meter::{CLASSES, OTHERS, PROTOCOLS, UNKNOWN};
use crate::trace::clock;

/// What the file says of the job, and names of what is counted by number.
#[derive(Clone, Debug)]
pub struct About {
    /// The job's identity on this node.
    pub job: u64,
    /// Time of day of MPI_Init, ms since 1970: nodes have no identity of the job in common.
    pub began_unix_ms: u64,
    /// Ranks in MPI_COMM_WORLD.
    pub size: u32,
    /// This host.
    pub host: String,
    /// Times are those of a simulated node.
    pub is_simulated: bool,
    /// Names of functions, by number.
    pub functions: Vec<&'static str>,
    /// Names of protocols, by number.
    pub protocols: Vec<&'static str>,
}

/// Time of day, ms since 1970.
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_millis() as u64
}

/// Set once counting has begun.
static ABOUT: OnceLock<(About, Moment)> = OnceLock::new();

/// A time by the clock that calls and messages are timed with, and in ns.
#[derive(Clone, Copy, Debug)]
struct Moment {
    clock: u64,
    ns: u64,
}

impl Moment {
    fn now() -> Moment {
        // Of the standard library, as that works under valgrind, too.
        static START: OnceLock<Instant> = OnceLock::new();
        let ns = || START.get_or_init(Instant::now).elapsed().as_nanos() as u64;
        if !clock::has_ticks() {
            let now = clock::now();
            return Moment {
                clock: now,
                ns: now,
            };
        }
        // The closest pair of a few: this thread may lose the processor between the two readings.
        let pairs = (0..5).map(|_| {
            let (before, ns, after) = (clock::now(), ns(), clock::now());
            let took = after.saturating_sub(before);
            (took, before.saturating_add(took / 2), ns)
        });
        let (_, clock, ns) = pairs.min().unwrap_or_default();
        Moment { clock, ns }
    }

    /// Nanoseconds in one unit of the clock.
    fn rate_since(self, first: Moment) -> f64 {
        let (clock, ns) = (
            self.clock.saturating_sub(first.clock),
            self.ns.saturating_sub(first.ns),
        );
        if clock == 0 {
            1.0
        } else {
            ns as f64 / clock as f64
        }
    }
}

/// From now on calls and messages are counted, with times by this clock (ns), or by the machine's.
pub fn begin(about: About, own_clock: Option<fn() -> u64>) {
    clock::choose(own_clock);
    calls::set_up(about.functions.len());
    if ABOUT.set((about, Moment::now())).is_ok() {
        meter::set_on();
    }
}

/// What the file says of the job, if calls and messages are counted.
pub fn about() -> Option<&'static About> {
    ABOUT.get().map(|(about, _)| about)
}

/// What a rank says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Details {
    /// From MPI_Init to MPI_Finalize, ns.
    pub run_ns: u64,
    /// By the number of the function.
    pub calls: BTreeMap<u16, Calls>,
    /// Messages.
    pub messages: Counted,
}

/// Words of an entry after its key.
const RATE_WORDS: usize = 7;

impl Details {
    /// Of this process so far; `None` if nothing is counted.
    pub fn so_far() -> Option<Details> {
        let (_, first) = ABOUT.get()?;
        let last = Moment::now();
        let rate = last.rate_since(*first);
        let ns = |time: u64| (time as f64 * rate) as u64;
        let mut details = Details {
            run_ns: last.ns.saturating_sub(first.ns),
            calls: calls::so_far(),
            messages: meter::so_far(),
        };
        for calls in details.calls.values_mut() {
            calls.time = ns(calls.time);
        }
        for rate in details.messages.rates.values_mut() {
            (rate.time, rate.min, rate.max) = (ns(rate.time), ns(rate.min), ns(rate.max));
        }
        Some(details)
    }

    /// As words, for shared memory.
    pub fn words(&self) -> Vec<u64> {
        let pairs = self.messages.pairs.iter();
        let sums: Vec<[u64; 3]> = pairs
            .flat_map(|(peer, pair)| pair_words(*peer, pair))
            .collect();
        let lengths = [self.calls.len(), self.messages.rates.len(), sums.len()];
        let mut words = vec![self.run_ns];
        words.extend(lengths.map(|length| length as u64));
        for (function, calls) in &self.calls {
            words.extend([u64::from(*function), calls.calls, calls.time]);
        }
        for ((protocol, class), rate) in &self.messages.rates {
            words.push(u64::from(*protocol) << 8 | u64::from(*class));
            words.extend([rate.messages, rate.bytes, rate.timed, rate.timed_bytes]);
            words.extend([rate.time, rate.min, rate.max]);
        }
        words.extend(sums.concat());
        words
    }

    /// What [`Details::words`] gave. `None` if that cannot be: another process has written it.
    pub fn from_words(words: &[u64]) -> Option<Details> {
        let mut words = words.iter().copied();
        let mut details = Details {
            run_ns: words.next()?,
            ..Details::default()
        };
        // Each entry takes a word at least, so that a length that cannot be ends with the words.
        let [calls, rates, sums] = [words.next()?, words.next()?, words.next()?];
        for _ in 0..calls {
            let [function, calls, time] = [words.next()?, words.next()?, words.next()?];
            let function = u16::try_from(function).ok()?;
            details.calls.insert(function, Calls { calls, time });
        }
        for _ in 0..rates {
            let key = words.next()?;
            let mut values = [0; RATE_WORDS];
            for value in &mut values {
                *value = words.next()?;
            }
            let [messages, bytes, timed, timed_bytes, time, min, max] = values;
            let (protocol, class) = (u8::try_from(key >> 8).ok()?, (key & 0xff) as u8);
            if usize::from(protocol) >= PROTOCOLS || usize::from(class) >= CLASSES {
                return None;
            }
            let rate = Rate {
                messages,
                bytes,
                timed,
                timed_bytes,
                time,
                min,
                max,
            };
            details.messages.rates.insert((protocol, class), rate);
        }
        for _ in 0..sums {
            let [key, messages, bytes] = [words.next()?, words.next()?, words.next()?];
            let (peer, place) = (key as u32, (key >> 32) as usize);
            let pair = details.messages.pairs.entry(peer).or_default();
            let mut all = pair.received.iter_mut().chain(&mut pair.sent);
            *all.nth(place)? = (messages, bytes);
        }
        Some(details)
    }

    /// Fields of a rank in the file: `run_ns`, `time_in_calls`, `rates` and `pairs`.
    pub fn json(&self, about: &About) -> Map<String, Value> {
        let name = |function: &u16| about.functions.get(usize::from(*function)).copied();
        let calls = self.calls.iter().filter_map(|(function, calls)| {
            let value = json!({ "calls": calls.calls, "ns": calls.time });
            Some(((*name(function)?).to_owned(), value))
        });
        let mut fields = Map::new();
        fields.insert("run_ns".into(), self.run_ns.into());
        fields.insert("time_in_calls".into(), calls.collect::<Map<_, _>>().into());
        fields.insert("rates".into(), self.rates_json(about));
        let pairs = &self.messages.pairs;
        let known = pairs.iter().filter(|(peer, _)| **peer < OTHERS);
        let known = known.map(|(peer, pair)| pair_json(Some(*peer), pair, about));
        fields.insert("pairs".into(), known.collect::<Vec<_>>().into());
        for (key, name) in [(OTHERS, "pairs_others"), (UNKNOWN, "pairs_unknown")] {
            if let Some(pair) = pairs.get(&key) {
                fields.insert(name.into(), pair_json(None, pair, about));
            }
        }
        fields
    }

    fn rates_json(&self, about: &About) -> Value {
        let mut by_protocol: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
        for ((protocol, class), rate) in &self.messages.rates {
            let Some(name) = about.protocols.get(usize::from(*protocol)) else {
                continue;
            };
            by_protocol.entry(name).or_default().push(json!({
                "from_bytes": class_from(*class),
                "messages": rate.messages,
                "bytes": rate.bytes,
                "timed": rate.timed,
                "timed_bytes": rate.timed_bytes,
                "ns": rate.time,
                "min_ns": rate.min,
                "max_ns": rate.max,
            }));
        }
        json!(by_protocol)
    }
}

/// Key (rank, and above it the place among received and sent), messages and bytes.
fn pair_words(peer: u32, pair: &Pair) -> impl Iterator<Item = [u64; 3]> {
    let all: Vec<Sum> = pair.received.iter().chain(&pair.sent).copied().collect();
    let happened = (0_u64..).zip(all).filter(|(_, sum)| sum.0 != 0);
    happened.map(move |(place, sum)| [place << 32 | u64::from(peer), sum.0, sum.1])
}

fn pair_json(peer: Option<u32>, pair: &Pair, about: &About) -> Value {
    let side = |names: &[&str], sums: &[Sum]| -> Value {
        let happened = names.iter().zip(sums).filter(|(_, sum)| sum.0 != 0);
        let named = happened.map(|(name, (messages, bytes))| {
            let value = json!({ "messages": messages, "bytes": bytes });
            ((*name).to_owned(), value)
        });
        named.collect::<Map<_, _>>().into()
    };
    let received = side(&about.protocols, &pair.received);
    let sent = side(&SentBy::ALL.map(SentBy::name), &pair.sent);
    match peer {
        Some(rank) => json!({ "rank": rank, "received": received, "sent": sent }),
        None => json!({ "received": received, "sent": sent }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn details() -> Details {
        let mut details = Details {
            run_ns: 7_000_000,
            ..Details::default()
        };
        let calls = Calls {
            calls: 3,
            time: 900,
        };
        details.calls.insert(1, calls);
        let rate = Rate {
            messages: 2,
            bytes: 3000,
            timed: 1,
            timed_bytes: 1500,
            time: 40,
            min: 40,
            max: 40,
        };
        details.messages.rates.insert((1, 11), rate);
        for peer in [5, OTHERS, UNKNOWN] {
            let pair = details.messages.pairs.entry(peer).or_default();
            pair.received[1] = (2, 3000);
            pair.sent[SentBy::Native as usize] = (1, 9);
        }
        details
    }

    fn names() -> About {
        About {
            job: 0xabc,
            began_unix_ms: 0,
            size: 8,
            host: "node7".into(),
            is_simulated: false,
            functions: vec!["MPI_Init", "MPI_Send"],
            protocols: vec!["native", "get"],
        }
    }

    #[test]
    fn units_of_the_clock_are_nanoseconds_by_two_moments() {
        clock::choose(None);
        let (first, began) = (Moment::now(), Instant::now());
        std::thread::sleep(std::time::Duration::from_millis(30));
        let (at, passed) = (clock::now(), began.elapsed().as_nanos() as f64);
        std::thread::sleep(std::time::Duration::from_millis(30));
        let told = (at - first.clock) as f64 * Moment::now().rate_since(first);
        // Between the readings a busy machine may take the processor away.
        assert!((told - passed).abs() < 5e6, "{told} {passed}");
    }

    #[test]
    fn words_say_what_was_said() {
        let details = details();
        let words = details.words();
        assert_eq!(Details::from_words(&words).as_ref(), Some(&details));
        for length in 0..words.len() {
            assert_eq!(Details::from_words(&words[..length]), None, "{length}");
        }
    }

    #[test]
    fn words_of_a_stranger_are_not_believed() {
        let words = details().words();
        for place in 0..words.len() {
            let mut wrong = words.clone();
            wrong[place] = u64::MAX;
            // Whatever comes of it, it is no panic, and no more than there were words for.
            if let Some(details) = Details::from_words(&wrong) {
                assert!(details.words().len() <= words.len());
            }
        }
        assert_eq!(Details::from_words(&[0, u64::MAX, 0, 0]), None);
        assert_eq!(Details::from_words(&[0, 0, 0, 1, 99 << 32, 1, 1]), None);
    }

    #[test]
    fn json_names_functions_protocols_and_ranks() {
        let json = Value::from(details().json(&names()));
        assert_eq!(
            json["time_in_calls"]["MPI_Send"],
            json!({"calls": 3, "ns": 900})
        );
        assert_eq!(json["rates"]["get"][0]["from_bytes"], 1024);
        assert_eq!(json["rates"]["get"][0]["timed_bytes"], 1500);
        assert_eq!(json["pairs"].as_array().map(Vec::len), Some(1));
        assert_eq!(json["pairs"][0]["rank"], 5);
        assert_eq!(json["pairs"][0]["received"]["get"]["bytes"], 3000);
        assert_eq!(json["pairs"][0]["sent"]["native"]["messages"], 1);
        assert_eq!(json["pairs_others"]["sent"]["native"]["bytes"], 9);
        assert_eq!(json["pairs_unknown"]["received"]["get"]["messages"], 2);
    }
}
