//! Tests of the directory: which ranks come and go, what is left behind, and what others put in its place.

use super::*;
use std::os::unix::fs::PermissionsExt;

/// A folder of the test's own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let path = Path::new("/dev/shm").join(format!("anabranch-test-{:016x}", sys::random_u64()));
        std::fs::create_dir(&path).expect("a folder");
        Self(path)
    }

    fn name(&self, job: u64) -> PathBuf {
        self.0.join(format!("anabranch-{}-{job:016x}", sys::user()))
    }

    fn entries(&self) -> usize {
        std::fs::read_dir(&self.0).expect("the folder").count()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).expect("the folder is removed");
    }
}

fn row(world_rank: u32) -> Row {
    let (pid, start) = proc::own_identity();
    Row {
        pid,
        world_rank,
        start_low: proc::low32(start),
        memfd: 9,
        version: PROTOCOL_VERSION,
    }
}

/// A row of a process that has ended.
fn dead_row(world_rank: u32) -> Row {
    let mut child = std::process::Command::new("true").spawn().expect("a child");
    let pid = child.id();
    child.wait().expect("it ends");
    Row {
        pid,
        start_low: 1,
        ..row(world_rank)
    }
}

fn write_private(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("written");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("permissions");
}

#[test]
fn ranks_find_each_other_and_the_last_one_out_removes_the_name() {
    let folder = Folder::new();
    let one = Directory::open(&folder.0, 1).expect("created");
    let two = Directory::open(&folder.0, 1).expect("joined");
    let other_job = Directory::open(&folder.0, 2).expect("created");
    let before = one.generation();
    one.register(row(0)).expect("registered");
    two.register(row(1)).expect("registered");
    assert_ne!(one.generation(), before);
    assert_eq!(one.rows().collect::<Vec<_>>(), [row(0), row(1)]);
    assert_eq!(other_job.rows().count(), 0);
    assert!(!two.device_in_use() && one.set_device_in_use() && !one.set_device_in_use());
    assert!(two.device_in_use() && !other_job.device_in_use());
    let mode = std::fs::metadata(folder.name(1)).expect("the page").mode();
    assert_eq!(mode & 0o7777, 0o600);

    one.unregister(row(0));
    one.leave();
    assert_eq!(two.rows().collect::<Vec<_>>(), [row(1)]);
    assert!(folder.name(1).exists());
    two.unregister(row(1));
    two.leave();
    assert!(!folder.name(1).exists());
    other_job.leave();
    assert_eq!(folder.entries(), 0);
}

#[test]
fn a_dead_jobs_directory_is_replaced_whatever_it_holds() {
    let folder = Folder::new();
    for contents in [
        &b""[..],
        b"short",
        &[0xff_u8; 4096],
        &[0_u8; 4096],
        &[7_u8; 9000],
    ] {
        write_private(&folder.name(1), contents);
        let directory = Directory::open(&folder.0, 1).expect("replaced");
        directory.register(row(0)).expect("registered");
        assert_eq!(directory.rows().count(), 1);
        directory.leave();
    }
}

#[test]
fn other_dead_jobs_directories_are_removed_and_living_ones_stay() {
    let folder = Folder::new();
    let living = Directory::open(&folder.0, 10).expect("created");
    living.register(row(0)).expect("registered");
    for job in 20..25 {
        write_private(&folder.name(job), &[7_u8; 4096]);
    }
    // A killed rank left this one: its page is sound, its row dead, its lock gone.
    let dead = Directory::open(&folder.0, 30).expect("created");
    dead.register(dead_row(0)).expect("registered");
    drop(dead);
    // The rank of this one lives, though the program has closed our file descriptor.
    let unlocked = Directory::open(&folder.0, 40).expect("created");
    unlocked.register(row(0)).expect("registered");
    drop(unlocked);
    write_private(&folder.0.join("unrelated"), b"x");

    let directory = Directory::open(&folder.0, 1).expect("created");
    let mut left: Vec<_> = std::fs::read_dir(&folder.0)
        .expect("a folder")
        .flatten()
        .map(|entry| entry.path())
        .collect();
    left.sort();
    let mut expected = [
        folder.name(1),
        folder.name(10),
        folder.name(40),
        folder.0.join("unrelated"),
    ];
    expected.sort();
    assert_eq!(left, expected);
    directory.leave();
}

#[test]
fn a_corrupt_or_foreign_directory_in_use_is_refused() {
    let folder = Folder::new();
    let write_at = |at: u64, bytes: &[u8]| {
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(folder.name(1))
            .expect("the page");
        file.write_all_at(bytes, at).expect("written");
    };
    for (at, bytes) in [(0, &[0xee_u8; 8][..]), (8, &[99, 0, 0, 0]), (16, &[1; 8])] {
        let holder = Directory::open(&folder.0, 1).expect("created");
        write_at(at, bytes);
        let refused = Directory::open(&folder.0, 1).expect_err("not ours");
        assert!(matches!(refused, NodeError::Foreign(_)), "{refused}");
        assert!(refused
            .to_string()
            .contains(&folder.name(1).display().to_string()));
        holder.leave();
    }
    let holder = Directory::open(&folder.0, 1).expect("created");
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(folder.name(1))
        .expect("the page");
    file.set_len(8192).expect("grown");
    assert!(matches!(
        Directory::open(&folder.0, 1),
        Err(NodeError::Foreign(_))
    ));
    holder.leave();
}

#[test]
fn names_that_others_could_have_laid_are_not_followed() {
    let folder = Folder::new();
    let victim = folder.0.join("victim");
    write_private(&victim, b"precious");
    std::os::unix::fs::symlink(&victim, folder.name(1)).expect("a link");
    assert!(matches!(
        Directory::open(&folder.0, 1),
        Err(NodeError::Untrusted(_))
    ));
    std::fs::remove_file(folder.name(1)).expect("removed");

    std::os::unix::fs::symlink(folder.0.join("nowhere"), folder.name(1)).expect("a link");
    assert!(Directory::open(&folder.0, 1).is_err());
    std::fs::remove_file(folder.name(1)).expect("removed");

    std::fs::create_dir(folder.name(1)).expect("a folder in its place");
    assert!(Directory::open(&folder.0, 1).is_err());
    std::fs::remove_dir(folder.name(1)).expect("removed");

    write_private(&folder.name(1), b"");
    std::fs::set_permissions(folder.name(1), std::fs::Permissions::from_mode(0o666))
        .expect("permissions");
    assert!(matches!(
        Directory::open(&folder.0, 1),
        Err(NodeError::Untrusted(_))
    ));

    let path =
        std::ffi::CString::new(folder.name(2).as_os_str().as_encoded_bytes()).expect("a path");
    // SAFETY: a C string; a named pipe would block a process that opens it to read.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    assert!(matches!(
        Directory::open(&folder.0, 2),
        Err(NodeError::Untrusted(_))
    ));
    assert_eq!(std::fs::read(&victim).expect("read"), b"precious");
}

const MEETS: &str = "ANABRANCH_TEST_MEETS";

/// Not a test of its own: what the test binary does as a process of another user.
#[test]
fn other_user() {
    let Ok(folder) = std::env::var(MEETS) else {
        return;
    };
    let folder = PathBuf::from(folder);
    // A name that root has taken, closed and then open to all.
    let taken = |job| match Directory::open(&folder, job) {
        Err(error @ NodeError::Untrusted(_)) => error.to_string(),
        other => format!("{other:?}"),
    };
    println!("@{}", taken(1));
    println!("@{}", taken(2));
    // One of its own, which root must not take.
    let own = Directory::open(&folder, 3).expect("created");
    println!("@there");
    std::io::stdin()
        .read_line(&mut String::new())
        .expect("told");
    own.leave();
}

/// Anybody may lay a file in /dev/shm under the name of another user's directory.
#[test]
fn a_directory_of_another_user_is_refused() {
    use crate::node::other_user::OtherUser;
    let folder = Folder::new();
    std::fs::set_permissions(&folder.0, std::fs::Permissions::from_mode(0o1777)).expect("opened");
    let name = |uid: u32, job: u64| folder.0.join(format!("anabranch-{uid}-{job:016x}"));
    let uid = 65_534;
    for (job, mode) in [(1, 0o600), (2, 0o666)] {
        write_private(&name(uid, job), &[0; 4096]);
        std::fs::set_permissions(name(uid, job), std::fs::Permissions::from_mode(mode))
            .expect("permissions");
    }
    let place = folder.0.display();
    let Some(mut other) = OtherUser::start(module_path!(), MEETS, &place) else {
        return;
    };
    assert_eq!(other.uid(), uid);
    for job in [1, 2] {
        let path = name(uid, job);
        let path = path.display();
        let said = format!(
            "{path} is not a private file of this user; remove it, or have its owner do so"
        );
        other.expect(&said);
    }
    other.expect("there");
    // Root could open it all the same.
    std::fs::hard_link(name(uid, 3), folder.name(3)).expect("a second name");
    assert!(matches!(
        Directory::open(&folder.0, 3),
        Err(NodeError::Untrusted(_))
    ));
    other.tell();
}

#[test]
fn a_folder_that_is_not_there_is_an_error() {
    let error = Directory::open(Path::new("/nonexistent/folder"), 1).expect_err("no folder");
    assert!(
        error
            .to_string()
            .starts_with("/nonexistent/folder/anabranch-"),
        "{error}"
    );
}

#[test]
fn rows_of_the_dead_are_taken_over_and_those_of_the_living_are_not() {
    let folder = Folder::new();
    let directory = Directory::open(&folder.0, 1).expect("created");
    for rank in 0..ROWS as u32 {
        directory.register(row(rank)).expect("a free row");
    }
    assert!(matches!(
        directory.register(row(1_000)),
        Err(NodeError::Full)
    ));
    let dead = dead_row(77);
    let cells = &directory.page().rows[77];
    cells.who.store(dead.who(), Ordering::Relaxed);
    cells.what.store(dead.what(), Ordering::Relaxed);
    directory.register(row(1_000)).expect("the dead one's row");
    assert_eq!(directory.rows().nth(77), Some(row(1_000)));
    // Half-written by a process that died in between.
    directory.page().rows[5]
        .who
        .store(dead.who(), Ordering::Relaxed);
    directory.page().rows[5].what.store(0, Ordering::Relaxed);
    assert_eq!(directory.rows().count(), ROWS - 1);
    directory
        .register(row(1_001))
        .expect("the half-written row");
    directory.leave();
}

#[test]
fn a_living_process_keeps_its_rank() {
    let folder = Folder::new();
    let directory = Directory::open(&folder.0, 1).expect("created");
    let mut child = std::process::Command::new("sleep")
        .arg("60")
        .spawn()
        .expect("a child");
    let theirs = Row {
        pid: child.id(),
        start_low: proc::low32(proc::stat(child.id()).expect("it runs").start),
        ..row(3)
    };
    directory.register(theirs).expect("registered");
    let refused = directory.register(row(3)).expect_err("taken");
    assert!(
        matches!(refused, NodeError::RankTaken { world_rank: 3, pid } if pid == child.id()),
        "{refused}"
    );
    assert_eq!(directory.rows().collect::<Vec<_>>(), [theirs]);
    child.kill().expect("killed");
    child.wait().expect("it ends");
    directory.register(row(3)).expect("free now");
    directory.leave();
}

#[test]
fn threads_that_come_and_go_at_once_leave_nothing() {
    let folder = Folder::new();
    std::thread::scope(|scope| {
        for rank in 0..8 {
            let folder = &folder.0;
            scope.spawn(move || {
                for _ in 0..50 {
                    let directory = Directory::open(folder, 1).expect("opened");
                    directory.register(row(rank)).expect("registered");
                    assert!(directory.rows().any(|found| found == row(rank)));
                    directory.unregister(row(rank));
                    directory.leave();
                }
            });
        }
    });
    assert_eq!(folder.entries(), 0);
}
