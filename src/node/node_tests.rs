//! Tests with several processes: the test binary runs itself as another rank.

use super::*;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

const ROLE: &str = "ANABRANCH_TEST_ROLE";

/// A folder of the test's own, and the job in it.
struct Job {
    folder: PathBuf,
    name: String,
}

impl Job {
    fn new() -> Self {
        let name = format!("anabranch-test-{:016x}", sys::random_u64());
        let folder = Path::new("/dev/shm").join(&name);
        std::fs::create_dir(&folder).expect("a folder");
        Self { folder, name }
    }

    fn register(&self, world_rank: u32) -> Result<Node, NodeError> {
        register(&self.folder, &self.name, world_rank, None)
    }

    /// Runs this test binary as another rank, in a role.
    fn start(&self, role: &str, world_rank: u32) -> Rank {
        let mut child = Command::new(std::env::current_exe().expect("the test binary"))
            .args([
                "--exact",
                &format!(
                    "{}::other_rank",
                    module_path!().split_once("::").expect("a module").1
                ),
            ])
            .arg("--nocapture")
            .env(
                ROLE,
                format!(
                    "{role} {} {} {world_rank}",
                    self.folder.display(),
                    self.name
                ),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("another rank starts");
        let lines = BufReader::new(child.stdout.take().expect("its output"));
        Rank { child, lines }
    }

    fn entries(&self) -> usize {
        std::fs::read_dir(&self.folder).expect("the folder").count()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.folder).expect("the folder is removed");
    }
}

fn register(
    folder: &Path,
    job: &str,
    world_rank: u32,
    local_size: Option<u32>,
) -> Result<Node, NodeError> {
    let launch = Launch {
        local_size,
        ..Launch::named(job)
    };
    let options = Options {
        folder: folder.to_owned(),
        ..Options::default()
    };
    Node::register(&launch, world_rank, &options)
}

struct Rank {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Rank {
    /// Returns what follows `word` in the next line that starts with it.
    fn expect(&mut self, word: &str) -> String {
        let mut line = String::new();
        while self.lines.read_line(&mut line).expect("a line") > 0 {
            // The test runner's own words precede ours on the first line.
            if let Some((_, rest)) = line.split_once(&format!("@{word}")) {
                return rest.trim().to_owned();
            }
            line.clear();
        }
        panic!("the other rank ended before it said {word}");
    }

    fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("it ends");
    }

    /// Ends the rank in order: it waits for the end of its input.
    fn end(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().expect("it ends").success());
    }
}

fn say(word: &str) {
    println!("@{word}");
}

fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("input");
    line.trim().to_owned()
}

/// Not a test of its own: what the test binary does when it is run as another rank.
#[test]
fn other_rank() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let words: Vec<_> = role.split(' ').collect();
    let node = register(
        Path::new(words[1]),
        words[2],
        words[3].parse().expect("a rank"),
        None,
    )
    .expect("registered");
    match words[0] {
        "idle" => {
            say("registered");
            hear();
        }
        "sender" => send_one(&node),
        "device" => {
            node.announce_device_use();
            say("registered");
            hear();
        }
        other => panic!("unknown role {other}"),
    }
}

const PAYLOAD: &[u8] = b"payload of a message between processes";

/// Posts a message, shows its RTS, brings the payload through the pipeline in host memory when asked, and
/// waits for the end.
fn send_one(node: &Node) {
    let own = node.own();
    own.set_ready(Readiness::All);
    let slot_index = own.alloc(None).expect("a slot");
    let message = Message {
        source: node.world_rank(),
        sequence: 3,
        length: PAYLOAD.len() as u64,
        ..Message::default()
    };
    let nonce = own.post(slot_index, &message).expect("a nonce");
    let rts = Rts {
        job: node.launch().hash,
        sender: node.world_rank(),
        slot: slot_index,
        nonce,
        sequence: 3,
        length: message.length,
        digest: message.digest(),
    };
    say(&format!("RTS {:?}", rts.encode()));
    let slot = own.slot(slot_index).expect("the slot");
    wait_for(own, || slot.state(nonce) == Ok(SlotState::WantHost));
    let chunk = own.take_chunk().expect("a chunk");
    let (address, _) = own.piece(chunk).expect("its address");
    // SAFETY: the chunk is ours and larger than the payload.
    unsafe {
        address
            .as_ptr()
            .copy_from_nonoverlapping(PAYLOAD.as_ptr(), PAYLOAD.len())
    };
    let entry = Entry {
        piece: chunk,
        bytes: PAYLOAD.len() as u32,
    };
    assert_eq!(slot.ring(nonce).push(entry), Ok(true));
    wait_for(own, || slot.state(nonce) == Ok(SlotState::Done));
    assert_eq!(slot.ring(nonce).in_flight(), Ok(0));
    assert!(own.give(chunk) && own.free(slot_index));
    say("done");
    hear();
}

fn wait_for(own: &Segment, is_met: impl Fn() -> bool) {
    for _ in 0..600 {
        let seen = own.doorbell();
        if is_met() {
            return;
        }
        own.wait_doorbell(seen, Duration::from_millis(100));
    }
    panic!("nothing came for a minute");
}

fn bytes_of(text: &str) -> Vec<u8> {
    let numbers = text
        .trim_start_matches('[')
        .trim_end_matches(']')
        .split(", ");
    numbers
        .map(|number| number.parse().expect("a byte"))
        .collect()
}

#[test]
fn a_message_goes_from_process_to_process() {
    let job = Job::new();
    let node = job.register(0).expect("registered");
    let mut sender = job.start("sender", 5);
    let bytes = bytes_of(&sender.expect("RTS"));
    let peer = node.peer(5).expect("the sender is there");
    assert!(peer.alive() && peer.ready() && !peer.finalizing());
    assert_eq!((peer.world_rank(), peer.pid()), (5, sender.child.id()));

    let rts = Rts::decode(&bytes, node.launch().hash).expect("an RTS");
    let (slot, message) = peer.validate(&rts).expect("it is borne out");
    assert_eq!(
        (message.sequence, message.length, message.source),
        (3, PAYLOAD.len() as u64, 5)
    );
    for wrong in [
        Rts {
            nonce: rts.nonce ^ 0x100,
            ..rts
        },
        Rts {
            slot: rts.slot + 1,
            ..rts
        },
        Rts { sequence: 4, ..rts },
        Rts { length: 4, ..rts },
        Rts {
            slot: SLOTS_MAX - 1,
            ..rts
        },
        Rts { sender: 0, ..rts },
        Rts { job: 1, ..rts },
        Rts {
            digest: rts.digest ^ 1,
            ..rts
        },
    ] {
        assert!(peer.validate(&wrong).is_err(), "{wrong:?}");
    }

    let nonce = rts.nonce;
    slot.want_host(nonce).expect("posted");
    peer.ring_doorbell();
    let mut backoff = Backoff::sleeping(Duration::from_millis(5));
    let entry = loop {
        if let Some(entry) = slot.ring(nonce).front().expect("the ring is sound") {
            break entry;
        }
        backoff.snooze();
        assert!(peer.alive());
    };
    let (address, length) = peer.piece_of(entry).expect("within the peer's staging");
    // SAFETY: in bounds, and the sender does not touch it before we pop.
    let payload = unsafe { std::slice::from_raw_parts(address.as_ptr(), length) }.to_vec();
    assert_eq!(slot.ring(nonce).pop(), Ok(true));
    slot.send_ats(nonce).expect("ours to end");
    peer.ring_doorbell();
    assert_eq!(payload, PAYLOAD);
    sender.expect("done");
    assert_eq!(peer.validate(&rts).map(drop), Err(Corruption::Stale));
    sender.end();
    assert!(!peer.alive() && peer.finalizing());
    assert_eq!(job.entries(), 1);
    drop(node);
    assert_eq!(job.entries(), 0);
}

#[test]
fn ranks_come_to_know_each_other_and_the_use_of_devices() {
    let job = Job::new();
    let node = job.register(0).expect("registered");
    assert!(node.peer(1).is_none() && !node.device_in_use());
    let mut ranks: Vec<_> = (1..4).map(|rank| job.start("idle", rank)).collect();
    ranks.push(job.start("device", 4));
    for rank in &mut ranks {
        rank.expect("registered");
    }
    let found: Vec<_> = node.peers().iter().map(|peer| peer.world_rank()).collect();
    assert_eq!(found, [0, 1, 2, 3, 4]);
    assert_eq!(node.local_size(), 5);
    assert!(node.device_in_use());
    assert!(
        node.peer(4).expect("rank 4").device_user() && !node.peer(3).expect("rank 3").device_user()
    );
    assert!(matches!(
        job.register(2),
        Err(NodeError::RankTaken { world_rank: 2, .. })
    ));
    ranks.into_iter().for_each(Rank::end);
    assert!(node
        .peer(2)
        .is_some_and(|peer| peer.finalizing() && !peer.alive()));
}

#[test]
fn a_killed_rank_is_seen_as_dead_and_replaced() {
    let job = Job::new();
    let node = job.register(0).expect("registered");
    let mut rank = job.start("idle", 1);
    rank.expect("registered");
    let old = node.peer(1).expect("rank 1");
    assert!(old.alive());
    rank.kill();
    assert!(!old.alive() && !old.finalizing());
    let mut rank = job.start("idle", 1);
    rank.expect("registered");
    assert_eq!(node.peers().len(), 2);
    let new = node.peer(1).expect("rank 1 again");
    assert!(new.alive() && new.pid() == rank.child.id() && old.pid() != new.pid());
    rank.end();
}

#[test]
fn what_a_killed_job_leaves_is_removed_by_the_next() {
    let job = Job::new();
    let mut ranks: Vec<_> = (0..2).map(|rank| job.start("idle", rank)).collect();
    ranks
        .iter_mut()
        .for_each(|rank| drop(rank.expect("registered")));
    ranks.into_iter().for_each(Rank::kill);
    assert_eq!(job.entries(), 1);
    let other = register(&job.folder, "another job", 0, None).expect("registered");
    assert_eq!(job.entries(), 1, "the new one's only");
    drop(other);
    assert_eq!(job.entries(), 0);
}

#[test]
fn the_name_goes_as_soon_as_all_are_there() {
    let job = Job::new();
    let one = register(&job.folder, &job.name, 0, Some(2)).expect("registered");
    assert!(!one.proves_off_node(9));
    assert_eq!(job.entries(), 1);
    let two = register(&job.folder, &job.name, 1, Some(2)).expect("registered");
    assert_eq!(job.entries(), 0);
    assert!(one.proves_off_node(9) && !one.proves_off_node(1) && two.proves_off_node(9));
    two.unregister();
    two.unregister();
    assert!(!one.proves_off_node(1), "it was here");
}

#[test]
fn a_child_of_fork_does_not_unregister_its_parent() {
    let job = Job::new();
    let node = job.register(0).expect("registered");
    // SAFETY: the child only drops the node, without taking locks that another thread may hold, and leaves.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        node.unregister();
        drop(node);
        // SAFETY: ends the child without running the test runner's exit handlers.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0);
    assert!(!node.own().finalizing());
    assert_eq!(job.entries(), 1);
    let other = job.register(1).expect("registered");
    assert!(other.peer(0).is_some_and(|peer| peer.alive()));
}

#[test]
fn a_launcher_that_gave_another_rank_is_not_believed() {
    let launch = Launch {
        world_rank: Some(3),
        ..Launch::named("spawned")
    };
    let refused = Node::register(&launch, 0, &Options::default()).expect_err("another world");
    assert!(matches!(
        refused,
        NodeError::RankDiffers {
            world_rank: 0,
            launched: 3
        }
    ));
}

#[test]
fn a_rank_whose_descriptor_was_closed_is_not_a_peer() {
    let job = Job::new();
    let node = job.register(0).expect("registered");
    let other = job.register(1).expect("registered");
    let mut ends = [0; 2];
    // SAFETY: two writable ints.
    let result = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) };
    assert_eq!(result, 0);
    // SAFETY: puts a pipe in the place of the other rank's memfd, as a program may.
    assert!(unsafe { libc::dup2(ends[0], other.own().file_number()) } >= 0);
    assert!(node.peer(1).is_none());
    assert_eq!(node.local_size(), 2, "registered, though out of reach");
    // SAFETY: file descriptors made above.
    unsafe {
        libc::close(other.own().file_number());
        libc::close(ends[0]);
        libc::close(ends[1]);
    }
}

const SHARES: &str = "ANABRANCH_TEST_SHARES";

/// Not a test of its own: what the test binary does as a process of another user.
#[test]
fn other_user() {
    let Ok(given) = std::env::var(SHARES) else {
        return;
    };
    let own = Segment::create(owner_of(1), &Options::default()).expect("a segment");
    println!("@{}", own.file_number());
    let number = given.parse().expect("a number");
    let (pid, start) = (std::os::unix::process::parent_id(), 0);
    let start = proc::stat(pid).map_or(start, |stat| stat.start);
    let refused = Peer::open(7, 0, pid, proc::low32(start), number).expect_err("root's");
    println!("@{refused}");
    std::io::stdin()
        .read_line(&mut String::new())
        .expect("told");
}

fn owner_of(world_rank: u32) -> Owner {
    let (pid, start) = proc::own_identity();
    Owner {
        job: 7,
        world_rank,
        pid,
        start,
    }
}

/// Even if the directory named it: a segment is attached to only if it is this user's own.
#[test]
fn a_segment_of_another_user_is_refused() {
    let own = Segment::create(owner_of(0), &Options::default()).expect("a segment");
    let number = u16::try_from(own.file_number()).expect("a number");
    let open = |pid: u32, number| {
        let start = proc::stat(pid).map_or(0, |stat| stat.start);
        let rank = u32::from(pid != std::process::id());
        Peer::open(7, rank, pid, proc::low32(start), number)
    };
    open(std::process::id(), number).expect("this user's");
    // Open to others: as if a program had changed its mode.
    let set = |mode| {
        let path = format!("/proc/self/fd/{number}");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(path, mode).expect("a mode");
    };
    set(0o640);
    let refused = open(std::process::id(), number).expect_err("others may read it");
    assert!(
        matches!(refused, PeerError::Untrusted { mode: 0o640, .. }),
        "{refused}"
    );
    set(0o600);

    let Some(mut other) = other_user::OtherUser::start(module_path!(), SHARES, number) else {
        return;
    };
    let theirs = other.hear().parse().expect("a number");
    let refused = open(other.pid(), theirs).expect_err("another user's");
    let said = format!(
        "the segment of process {} belongs to user {} with mode 0600, and is not private to this user",
        other.pid(),
        other.uid()
    );
    // Root may come as far as the file, unless its rights were cut down.
    let is_closed = matches!(&refused, PeerError::Open { error, .. } if error.kind() == io::ErrorKind::PermissionDenied);
    assert!(
        is_closed || refused.to_string().starts_with(&said),
        "{refused}"
    );
    let said = other.hear();
    let pid = std::process::id();
    let expected = format!("the segment of process {pid} cannot be opened: Permission denied");
    assert!(said.starts_with(&expected), "{said}");
    other.tell();
}

#[test]
fn a_rank_that_is_alone_meets_nobody_and_leaves_nothing() {
    let launch = Launch {
        local_size: Some(2),
        ..Launch::named("alone")
    };
    let options = Options {
        folder: PathBuf::from("/nonexistent/folder"),
        ..Options::default()
    };
    let refused = Node::register(&launch, 0, &options).expect_err("no folder");
    assert!(refused.leaves_alone(), "{refused}");
    let ranks = [0, 1].map(|rank| Node::alone(&launch, rank, &options).expect("memory"));
    for (own, other) in [(0, 1), (1, 0)] {
        let node = &ranks[own as usize];
        let met: Vec<_> = node.peers().iter().map(|peer| peer.world_rank()).collect();
        assert_eq!(met, [own]);
        assert!(node.peer(other).is_none());
        assert!(!node.proves_off_node(other), "it may be next door");
    }
    ranks[0].announce_device_use();
    assert!(ranks[0].device_in_use() && !ranks[1].device_in_use());
    ranks.iter().for_each(Node::unregister);
    assert!(!options.folder.exists());
}
