//! Which paths a message takes: the run-time side of the planner.
//!
//! The [`Router`] holds the node's topology and model, and the ledger of what the links carry. For each long
//! message the one rank that leads its transfer asks it once. The answer is a plan and a reservation, which
//! stays in the ledger until it is dropped.

mod host_rate;
mod host_use;
mod kept;
mod ledger;
mod published_model;
mod source;
pub mod survey;
mod wiring;

pub use ledger::Reservation;
pub use survey::{Survey, LARGE as SURVEY_BYTES};

use std::path::PathBuf;
use std::sync::Arc;

use hashbrown::HashMap;

use crate::config::{Config, Owner, Paths};
use crate::cuda::{clock_ns, Uuid};
use crate::model::{HostPart, Model};
use crate::node::traffic::Ends;
use crate::node::{Peer, Wiring};
use crate::plan::{LeastGain, Message, Occupancy, Options, PathKind, Plan, Planner};
use crate::policy::decided;
use crate::topology::{Place, Topology};
use crate::transfer::Env;
pub use host_use::HostFared;
use host_use::{Counted, HostUse};
use ledger::{Ledger, Use};
use published_model::PublishedModel;

/// Plans that are remembered: for a few message lengths between all pairs of a node.
const PLANS_MAX: usize = 256;

/// What the rank that leads a transfer can do.
#[derive(Clone, Copy)]
pub struct RouteUse<'a> {
    /// Whether a message may go over the GPU of this identity. Asked about each GPU that is neither end.
    pub relay: &'a dyn Fn(&Uuid) -> bool,
    /// Whether it may go through host memory.
    pub host: bool,
    /// The paths that it may take.
    pub paths: Paths,
    /// The engine of the sender's GPU may make the direct copy. Otherwise the receiver's engine reads.
    pub may_put: bool,
    /// Messages like it have gone directly so far.
    pub goes_directly: bool,
    /// The receiver has sent an RTR, and the sender writes the direct part before it sends the RTS.
    pub is_begun: bool,
    /// The receiver also sends to the sender.
    pub goes_both_ways: bool,
    /// Who makes the copies.
    pub assign: Owner,
}

/// The route of one message.
#[derive(Debug)]
pub struct Routed {
    /// How it is moved; possibly in one direct copy, see [`Routed::is_split`].
    pub plan: Arc<Plan>,
    /// Its use of the links, which all ranks of the node know. To be kept until the message is over.
    pub reservation: Reservation,
    /// Set if it goes through host memory: what it counts on there, and where the outcome is recorded.
    host: Option<(Counted, Arc<HostUse>)>,
    /// It would be split if others did not use the links.
    would_be_split: bool,
    /// When to look at the ledger, by [`clock_ns`]. Before that the ledger tells too little, and a look at
    /// the end would take time.
    look_ns: u64,
}

/// A single message looks at the ledger this long before its predicted end, us, or after a quarter of its
/// time: it is planned up to 10 us after its copy has begun.
const LOOK_US: f64 = 20.0;

impl Routed {
    fn new(
        plan: Arc<Plan>,
        reservation: Reservation,
        host: Option<(Counted, Arc<HostUse>)>,
        would_be_split: bool,
    ) -> Routed {
        let look_ns = match plan.message.window {
            1 => {
                let us = plan.predicted_us;
                clock_ns().saturating_add((1e3 * (us - LOOK_US).max(us / 4.0)) as u64)
            }
            // In a window, other messages are under way when one ends.
            _ => u64::MAX,
        };
        Routed {
            plan,
            reservation,
            host,
            would_be_split,
            look_ns,
        }
    }

    /// To be called now and then while the message is under way.
    pub fn look(&mut self) {
        if self.look_ns == u64::MAX {
            return;
        }
        let now_ns = clock_ns();
        if now_ns >= self.look_ns {
            // Look again if it takes longer than it should: some of those that slow it may have begun just
            // now.
            let late_us = (self.plan.predicted_us / 4.0).max(2.0 * LOOK_US);
            self.look_ns = now_ns.saturating_add((1e3 * late_us) as u64);
            self.reservation.look();
        }
    }

    /// The message is over. `how` tells how its part in host memory did.
    pub fn record_host_lateness(&self, how: HostFared) {
        if let Some((counted, host)) = &self.host {
            let window = self.plan.message.window;
            let each_us = self.plan.predicted_us / f64::from(window);
            host.note(window, *counted, how, each_us);
        }
    }

    /// Whether recording that is of use.
    #[must_use]
    pub fn is_to_tell(&self) -> bool {
        self.host.is_some()
    }

    /// Whether the plan is more than one direct copy.
    #[must_use]
    pub fn is_split(&self) -> bool {
        is_split(&self.plan)
    }

    /// Whether it would be on an idle node.
    #[must_use]
    pub fn would_be_split(&self) -> bool {
        self.would_be_split
    }

    /// The message does not take this route after all. Another plan may be asked for instead.
    pub fn withdraw(self) {
        self.reservation.withdraw();
    }
}

fn is_split(plan: &Plan) -> bool {
    !matches!(plan.paths(), [only] if only.path.kind() == PathKind::Direct)
}

/// The node as it was measured.
struct Node {
    planner: Planner,
    /// For a rank that makes all copies itself: nothing is handed over between processes, whatever the place.
    planner_of_one: Planner,
    topology: Topology,
    /// The hops of the topology, by names that all ranks share.
    ends: Vec<Ends>,
    /// Identities of its GPUs.
    uuids: Vec<Uuid>,
    /// Set if the node was not measured as a whole, but by what ranks find out in passing.
    partly: Option<Partly>,
}

/// What is known of a node that was not measured as a whole.
#[derive(Default)]
struct Partly {
    /// From which GPU to which GPU the direct copy was measured.
    direct: Vec<(u8, u8)>,
    /// The system has told which pairs have links of their own. Otherwise it is not known what relays share
    /// with others.
    is_wired: bool,
}

/// What is known of the node.
enum Known {
    /// Nobody has looked.
    Unread,
    /// It was measured before.
    Measured(Box<Node>),
    /// It was not measured before, or has changed since: the ranks measure what they can themselves. The node
    /// as far as they have published it, and a sum over what they had published by then.
    PublishedModel(Option<Box<Node>>, u64),
}

impl Known {
    fn node(&self) -> Option<&Node> {
        match self {
            Known::Unread => None,
            Known::Measured(node) => Some(node),
            Known::PublishedModel(node, _) => node.as_deref(),
        }
    }
}

/// Everything that a plan depends on.
#[derive(PartialEq, Hash)]
struct Question {
    message: Message,
    relays_over: u32,
    host: bool,
    paths: Paths,
    goes_directly: bool,
    is_begun: bool,
    goes_both_ways: bool,
    assign: Owner,
    host_counted: Counted,
    others: Occupancy,
}

// No rate is NaN: each is made of published rates, and invalid ones are skipped.
impl Eq for Question {}

/// The answer to a question: a plan, and its use of each hop.
#[derive(Clone)]
struct Answer {
    plan: Arc<Plan>,
    uses: Arc<[Use]>,
}

type Answers = HashMap<Question, Option<Answer>>;

/// Chooses the paths of messages.
pub struct Router {
    options: Options,
    file: Option<PathBuf>,
    known: Known,
    ledger: Option<Arc<Ledger>>,
    /// What the host's memory was found to carry.
    host: Arc<HostUse>,
    /// Recent answers to questions.
    plans: Answers,
    /// Whether the links of a GPU lead to a switch, for GPUs of which that is known, and what ranks had
    /// published when that was asked.
    switched: (Option<u64>, HashMap<Uuid, bool>),
}

impl Router {
    /// Bytes of staging that one path may use at each of its staging places.
    #[must_use]
    pub fn staging_bytes(&self) -> u64 {
        self.options.staging_bytes
    }

    /// Looks at nothing before the first message that is long enough.
    #[must_use]
    pub fn new(config: &Config) -> Router {
        let absolute = |file: &PathBuf| std::path::absolute(file).unwrap_or_else(|_| file.clone());
        Router {
            options: options(config),
            // The program may change its working directory.
            file: config.model.as_ref().map(absolute),
            known: Known::Unread,
            ledger: None,
            host: Arc::default(),
            plans: Answers::new(),
            switched: (None, HashMap::new()),
        }
    }

    /// The route of a message between two GPUs. `in_flight` messages of this pair are under way or about to
    /// be, this one included.
    ///
    /// `None` if messages are not split, if this one is too short for that, or if nothing is known of the two
    /// GPUs. It then takes one direct copy and nothing is reserved. A plan may also be just that copy. Then
    /// it is reserved, so that messages of others avoid its links.
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    pub fn plan(
        &mut self,
        env: &Env,
        from: Uuid,
        to: Uuid,
        bytes: u64,
        in_flight: u32,
        usable: RouteUse<'_>,
    ) -> Option<Routed> {
        if !env.may_split(bytes) || from == to {
            return None;
        }
        self.look(env, &[from, to]);
        let own = || Ledger::new(Some(env.node.own_shared()), Peer::alive);
        let ledger = self.ledger.get_or_insert_with(|| Arc::new(own()));
        let mut peers = env.node.peers();
        if let Known::PublishedModel(node, sum) = &mut self.known {
            let now = said(&peers);
            if *sum != now {
                let wired: Vec<_> = wired(&peers).collect();
                let told = PublishedModel::new(peers.iter().map(|peer| peer.traffic()), &wired);
                if let Some(told) = &told {
                    tell_model(&told.model);
                    tell_switches(&told.topology);
                }
                *node = told.and_then(Node::told).map(Box::new);
                *sum = now;
                self.plans.clear();
            }
        }
        peers.retain(|peer| peer.world_rank() != env.world_rank);
        ledger.set_peers(peers);
        self.route(from, to, bytes, in_flight, usable)
    }

    fn route(
        &mut self,
        from: Uuid,
        to: Uuid,
        bytes: u64,
        in_flight: u32,
        usable: RouteUse<'_>,
    ) -> Option<Routed> {
        let node = self.known.node()?;
        let (from, to) = (node.number(&from)?, node.number(&to)?);
        let host = &self.host;
        let question = |others: Occupancy| Question {
            message: Message {
                from,
                to,
                bytes,
                window: in_flight.max(1),
                may_put: usable.may_put,
            },
            relays_over: node.relays(from, to, usable.relay),
            host: usable.host && node.may_stage(from, to),
            paths: usable.paths,
            goes_directly: usable.goes_directly,
            is_begun: usable.is_begun,
            goes_both_ways: usable.goes_both_ways,
            assign: usable.assign,
            host_counted: host.counted(
                in_flight,
                usable.goes_both_ways || node.shares_host(&others),
            ),
            others,
        };
        let ledger = self.ledger.as_ref()?;
        let (plans, options) = (&mut self.plans, &self.options);
        // Published before the others are read: of two ranks that plan at the same moment at least one sees
        // the other.
        let first = question(Occupancy::free());
        let mut counted = first.host_counted;
        let alone = node.answer(plans, options, first)?;
        let (mut reservation, others) =
            ledger.reserve(&node.topology, &node.ends, &alone.plan, &alone.uses);
        let is_shared = node.shares_host(&others);
        let would_be_split = is_split(&alone.plan);
        let answer = if others.is_free() {
            alone
        } else {
            let segments = node.planner.segments_between(from, to);
            let second = question(others.on(segments));
            counted = second.host_counted;
            node.answer(plans, options, second)?
        };
        reservation.settle(&answer.plan, answer.uses);
        let mut kinds = answer.plan.paths().iter().map(|path| path.path.kind());
        // A message that leaves half to others which have not come says nothing about either case.
        let tells = counted.is_beside == is_shared;
        let is_told = tells && kinds.any(|kind| kind == PathKind::Host);
        let host = is_told.then(|| (counted, Arc::clone(&self.host)));
        Some(Routed::new(answer.plan, reservation, host, would_be_split))
    }

    /// Whether it is known that each of these GPUs receives everything through one port.
    pub fn is_switched(&mut self, env: &Env, gpus: &[Uuid]) -> bool {
        self.look(env, gpus);
        if let Known::Measured(node) = &self.known {
            return node.planner.is_switched();
        }
        gpus.iter().all(|gpu| self.is_at_switch(env, gpu))
    }

    /// The same for one GPU, as the system tells it. The answer does not change, so what others have
    /// published is not read for each message: they write to those lines all the time (rings of four H100s,
    /// single messages of 4 to 16 MiB that are read in turns: 0.98 of the speed without the library with a
    /// look for each, and shorter ones 1.00).
    fn is_at_switch(&mut self, env: &Env, gpu: &Uuid) -> bool {
        let (asked, known) = &mut self.switched;
        if let Some(is_switched) = known.get(gpu) {
            return *is_switched;
        }
        let peers = env.node.peers();
        let now = said(&peers);
        if asked.replace(now) != Some(now) {
            let rows = wired(&peers);
            known.extend(rows.map(|(uuid, wiring)| (uuid, wiring.is_switched)));
        }
        known.get(gpu).copied().unwrap_or(false)
    }

    /// The identity of a GPU of the topology by its number.
    #[must_use]
    pub fn uuid(&self, place: Place) -> Option<Uuid> {
        match place {
            Place::Gpu(gpu) => self.known.node()?.uuids.get(usize::from(gpu)).copied(),
            Place::Host => None,
        }
    }

    /// The number that a GPU has in the topology.
    #[must_use]
    pub fn gpu(&self, uuid: Uuid) -> Option<u8> {
        self.known.node()?.number(&uuid)
    }

    /// Whether nobody has measured the node of this GPU.
    pub fn is_unmeasured(&mut self, env: &Env, uuid: &Uuid) -> bool {
        self.look(env, &[*uuid]);
        matches!(self.known, Known::PublishedModel(..))
    }

    /// Finds out about the node, once.
    fn look(&mut self, env: &Env, ends: &[Uuid]) {
        if !matches!(self.known, Known::Unread) {
            return;
        }
        self.known = match source::kept(self.file.as_deref(), ends) {
            Ok(measured) => {
                log::info!("paths are chosen by {}", measured.file.display());
                Node::new(measured.topology, &measured.model, None)
                    .map_or(Known::PublishedModel(None, 0), |node| {
                        Known::Measured(Box::new(node))
                    })
            }
            Err(why) => {
                source::tell(env, self.file.is_some(), &why);
                Known::PublishedModel(None, 0)
            }
        };
    }
}

impl Node {
    fn told(told: PublishedModel) -> Option<Node> {
        let partly = Partly {
            direct: told.direct,
            is_wired: told.is_wired,
        };
        Node::new(told.topology, &told.model, Some(partly))
    }

    /// `None` if a GPU has no identity, or one that cannot be read.
    fn new(topology: Topology, model: &Model, partly: Option<Partly>) -> Option<Node> {
        let uuids = topology.gpus.iter();
        let uuids = uuids.map(|gpu| source::uuid(gpu.uuid.as_deref()?));
        let uuids = uuids.collect::<Option<Vec<Uuid>>>()?;
        let hops = topology.hops();
        Some(Node {
            partly,
            ends: hops
                .map(|(from, to, _)| ledger::ends(&uuids, from, to))
                .collect(),
            uuids,
            planner: Planner::new(&topology, model),
            planner_of_one: Planner::new(&topology, &model.of_one()),
            topology,
        })
    }

    /// What a recorded plan calls this node: its topology and model are written under that number.
    #[cfg(feature = "golden")]
    fn id(&self) -> u32 {
        use crate::policy::golden;
        use crate::topology::file::File;
        let node = golden::value(&(File::of(&self.topology), self.planner.model()));
        let id = crc32fast::hash(node.to_string().as_bytes());
        golden::write("node", id.into(), &node);
        id
    }

    /// Whether a path through the host may be planned. On a node known by what ranks find out in passing,
    /// only beside links that are known not to be those to the host, and only once the direct copy in this
    /// direction was measured. A plan without a direct copy would leave nothing to measure it by.
    fn may_stage(&self, from: u8, to: u8) -> bool {
        let direct = self.topology.hop(Place::Gpu(from), Place::Gpu(to));
        let is_nvlink = direct.is_some_and(|hop| hop.is_nvlink());
        self.partly
            .as_ref()
            .is_none_or(|partly| is_nvlink && partly.direct.contains(&(from, to)))
    }

    /// Whether paths over other GPUs may be planned. Only if it is known what they share with others, and
    /// also only once the direct copy was measured.
    fn may_relay(&self, from: u8, to: u8) -> bool {
        self.partly
            .as_ref()
            .is_none_or(|partly| partly.is_wired && partly.direct.contains(&(from, to)))
    }

    /// Whether others use the host's memory.
    fn shares_host(&self, others: &Occupancy) -> bool {
        others.flows(self.planner.of_host()) > 0
    }

    fn number(&self, uuid: &Uuid) -> Option<u8> {
        let at = self.uuids.iter().position(|known| known == uuid)?;
        u8::try_from(at).ok()
    }

    fn relays(&self, from: u8, to: u8, may: &dyn Fn(&Uuid) -> bool) -> u32 {
        if !self.may_relay(from, to) {
            return 0;
        }
        let is_end = |at: usize| at == usize::from(from) || at == usize::from(to);
        let gpus = self.uuids.iter().enumerate();
        let usable = gpus.filter(|(at, uuid)| !is_end(*at) && may(uuid));
        usable.fold(0, |set, (at, _)| set | 1 << at)
    }

    /// The plan for a question, if there is a route at all: remembered, or made now.
    fn answer(&self, known: &mut Answers, options: &Options, question: Question) -> Option<Answer> {
        if let Some(answer) = known.get(&question) {
            return answer.clone();
        }
        let Counted { is_beside, part } = question.host_counted;
        let options = Options {
            direct: question.paths.direct,
            relay: question.paths.relay,
            host: options.host && question.host && question.paths.host,
            relays_over: question.relays_over,
            host_part: is_beside.then_some(part),
            host_rate: if is_beside { HostPart::ALL } else { part },
            ..*options
        };
        let (planner, options) = match question.assign {
            Owner::Two => {
                let options = Options {
                    least_gain: LeastGain::of(question.goes_directly, question.is_begun),
                    both_ways: question.goes_both_ways,
                    ..options.by_each()
                };
                (&self.planner, options)
            }
            Owner::One => (
                &self.planner_of_one,
                options.by_one(self.planner_of_one.model()),
            ),
        };
        // If no path is allowed, as without a link and without the others, there is nothing to plan.
        let plan = decided!(
            "plan",
            (
                self.id(),
                question.assign == Owner::One,
                &question.message,
                &options,
                &question.others,
            ),
            planner.plan(&question.others, &question.message, &options)
        );
        if let Ok(plan) = &plan {
            tell_plan(plan, &question);
        }
        let answer = plan.ok().map(|plan| Answer {
            uses: ledger::uses(&self.topology, &self.uuids, &plan).into(),
            plan: Arc::new(plan),
        });
        if known.len() >= PLANS_MAX {
            known.clear();
        }
        known.insert(question, answer.clone());
        answer
    }
}

/// Logs a plan that was made for the first time, so that a user sees why a message took its route.
fn tell_plan(plan: &Plan, question: &Question) {
    if !log::log_enabled!(log::Level::Debug) {
        return;
    }
    let Message {
        from,
        to,
        bytes,
        window,
        ..
    } = question.message;
    let paths = plan.paths().iter();
    let paths = paths.map(|part| format!("{} {} B in {}", part.path, part.bytes, part.chunks));
    log::debug!(
        "plan: GPU{from} to GPU{to}, {bytes} B, window {window}, {}{}: {}; {:.1} us, directly {:.1}",
        if question.others.is_free() {
            "alone"
        } else {
            "beside others"
        },
        if question.goes_directly {
            ", so far directly"
        } else {
            ""
        },
        paths.collect::<Vec<_>>().join(", "),
        plan.predicted_us,
        plan.direct_us
    );
}

/// Logs what is known of the node from its ranks' measurements.
fn tell_model(model: &Model) {
    for hop in &model.hops {
        for line in [hop.push, hop.pull].into_iter().flatten() {
            let (alpha_us, gb_s) = (line.alpha_us, line.gb_s);
            log::debug!(
                "measured: {} to {}, {alpha_us:.1} us, {gb_s:.1} GB/s",
                hop.from,
                hop.to
            );
        }
    }
}

/// A number that changes whenever ranks publish more about the node.
fn said(ranks: &[Arc<Peer>]) -> u64 {
    let said = ranks.iter().map(|rank| rank.traffic().updates());
    said.fold(0, u64::wrapping_add)
}

/// The links of GPUs, as published by ranks that see these GPUs.
fn wired(ranks: &[Arc<Peer>]) -> impl Iterator<Item = (Uuid, Wiring)> + '_ {
    let gpu_pages = ranks.iter().filter_map(|rank| rank.gpu_page());
    let rows = gpu_pages.flat_map(|gpu_page| gpu_page.gpus());
    rows.filter_map(|row| Some((row.uuid(), row.wiring()?)))
}

/// Logs what the ranks have published of links to the host that GPUs share.
fn tell_switches(topology: &Topology) {
    for (_, switch) in topology.pcie.shared() {
        let gpus = switch.gpus.iter().map(|gpu| format!("GPU{gpu}"));
        let gpus = gpus.collect::<Vec<_>>().join(", ");
        log::debug!("one PCIe link to the host: {gpus}");
    }
}

/// With less pinned memory no message goes through host memory: its chunks, and those of relays with them,
/// would be too short.
const HOST_STAGING_MIN: u64 = crate::node::UNIT_BYTES;

/// What the options of a process allow the planner, except for the paths, which each question names.
#[must_use]
pub fn options(config: &Config) -> Options {
    let defaults = Options::default();
    let for_host = config.paths.host && config.multipath_staging >= HOST_STAGING_MIN;
    let host_bytes = if for_host {
        config.multipath_staging
    } else {
        u64::MAX
    };
    Options {
        host: for_host,
        relays_max: config.relays,
        chunks_max: config.chunks,
        staging_bytes: defaults
            .staging_bytes
            .min(config.relay_staging)
            .min(host_bytes),
        order: config.launch_order,
        ..defaults
    }
}

#[cfg(test)]
#[path = "route/tests.rs"]
mod tests;
