//! The planner against what was measured, against an exhaustive search, and against a simulation of its plans. Nothing of
//! what is expected here comes from the planner's own formulas.

use super::*;
use crate::topology::file::File;
use crate::topology::tests::{file, SHIPPED};
use crate::topology::Topology;

mod figures;
mod optimum;
mod properties;
mod reference;

const MIB: u64 = 1 << 20;

/// A topology and its planner.
struct Node {
    name: String,
    topology: Topology,
    planner: Planner,
}

impl Node {
    fn of(name: String, topology: Topology) -> Node {
        let planner = Planner::new(&topology, &Model::nominal(&topology));
        Node {
            name,
            topology,
            planner,
        }
    }

    fn shipped(name: &str) -> Node {
        Node::of(name.into(), file(name).topology().expect("a topology"))
    }

    fn plan(&self, message: &Message, options: &Options) -> Plan {
        self.planner
            .plan(&Occupancy::free(), message, options)
            .expect("a plan")
    }
}

/// Numbers that are the same for the same seed (xorshift64*, by Vigna).
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Half to one and a half.
    fn factor(&mut self) -> f64 {
        0.5 + (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A shipped topology with every rate and every time moved by up to a half.
fn moved(seed: u64) -> Node {
    let mut random = Random::new(seed);
    let name = SHIPPED[seed as usize % SHIPPED.len()].0;
    let mut file: File = file(name);
    let mut times = vec![
        &mut file.copy.setup_us,
        &mut file.copy.pull_extra_us,
        &mut file.calls.async_us,
        &mut file.calls.sync_us,
        &mut file.calls.query_us,
        &mut file.calls.memop_us,
    ];
    let pcie = file.pcie.as_mut().expect("PCIe");
    let host = file.host.as_mut().expect("a host");
    times.extend([
        &mut pcie.to_host_gb_s,
        &mut pcie.to_device_gb_s,
        &mut pcie.peer_gb_s,
    ]);
    times.extend([&mut host.write_gb_s, &mut host.read_gb_s]);
    times.extend(file.link.iter_mut().map(|link| &mut link.gb_s));
    times.extend(file.fabric.port_gb_s.as_mut());
    for value in times {
        *value *= random.factor();
    }
    Node::of(
        format!("{name} moved by seed {seed}"),
        file.topology().expect("a topology"),
    )
}

/// A thread that needs so long for each launch, and nothing for anything else; none where that is nothing.
fn of_launches(launch_us: f64) -> Option<Launcher> {
    let calls = Calls {
        launch_us,
        idle_us: 0.0,
        event_us: 0.0,
    };
    (launch_us > 0.0).then_some(Launcher {
        calls,
        finish_us: 0.0,
    })
}

/// What ships, and twenty more.
fn nodes() -> Vec<Node> {
    let shipped = SHIPPED.iter().map(|(name, _)| Node::shipped(name));
    shipped.chain((1..=20).map(moved)).collect()
}
