//! Sends file descriptors from rank to rank, over a socket that each rank has once it uses a GPU.
//!
//! Nobody waits: what does not fit into the other's queue is not sent, and what has not come is not there.
//!
//! The socket's name is no secret (`/proc/net/unix` lists it), and whoever is first has it. What is sent are
//! the program's GPU buffers. So each parcel has a connection of its own, of which the kernel says who is at
//! the other end: nothing is sent to, or taken from, a process of another user.

use super::sys::{self, SocketPeer};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with, AddressFamily,
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Files in one parcel at most: the kernel takes 253.
pub const FILES_MAX: usize = 128;
/// Words beside them at most.
const WORDS_MAX: usize = 4 + 2 * FILES_MAX;
/// Room for the files.
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(FILES_MAX));
/// Parcels that may wait for their receiver; the system may allow fewer.
const QUEUE_MAX: i32 = 256;
/// Senders that have connected and have not sent yet: each is about to. If there are more, the oldest is not
/// waited for.
const LATE_MAX: usize = 64;

/// This rank's socket.
#[derive(Debug)]
pub struct Parcels {
    socket: OwnedFd,
    late: Vec<(OwnedFd, u32)>,
}

/// What another rank has sent.
#[derive(Debug)]
pub struct Parcel {
    /// Pid of the sender, as the kernel says.
    pub pid: u32,
    /// What it says of the files.
    pub words: Vec<u64>,
    /// The files.
    pub files: Vec<OwnedFd>,
}

impl Parcels {
    /// Opens the socket of a process of a job.
    ///
    /// # Errors
    /// The system has none to give, or another process has this name.
    pub fn open(job: u64, pid: u32) -> io::Result<Parcels> {
        let socket = socket()?;
        bind(&socket, &address(job, pid)?)?;
        listen(&socket, QUEUE_MAX)?;
        Ok(Parcels {
            socket,
            late: Vec::new(),
        })
    }

    /// Sends files to a process of the job, of which `words` say what they are.
    ///
    /// # Errors
    /// It has no socket, its queue is full, or another process has its name.
    pub fn send(
        &self,
        (job, pid): (u64, u32),
        words: &[u64],
        files: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        // An empty one would look like the end of the connection.
        if words.is_empty() || files.len() > FILES_MAX || words.len() > WORDS_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let to = connected(job, pid)?;
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&to, &[IoSlice::new(&bytes)], &mut control, flags)?;
        Ok(())
    }

    /// The next parcel from a process of the same user, if one has come. Others are thrown away.
    ///
    /// # Errors
    /// The system's.
    pub fn receive(&mut self) -> io::Result<Option<Parcel>> {
        for at in 0..self.late.len() {
            let (from, pid) = &self.late[at];
            match taken(from.as_fd(), *pid) {
                Came::NotYet => {}
                Came::Nothing => {
                    self.late.remove(at);
                    return self.receive();
                }
                Came::Parcel(parcel) => {
                    self.late.remove(at);
                    return Ok(Some(parcel));
                }
            }
        }
        // Bounded: a process that keeps sending parcels of other users keeps nobody busy for ever.
        for _ in 0..FILES_MAX {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let from = match accept_with(&self.socket, flags) {
                Ok(from) => from,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error) => return Err(error.into()),
            };
            let Some(peer) = sys::socket_peer(from.as_raw_fd()).filter(is_of_this_user) else {
                continue;
            };
            match taken(from.as_fd(), peer.pid) {
                Came::Parcel(parcel) => return Ok(Some(parcel)),
                Came::Nothing => {}
                Came::NotYet => {
                    if self.late.len() >= LATE_MAX {
                        self.late.remove(0);
                    }
                    self.late.push((from, peer.pid));
                }
            }
        }
        Ok(None)
    }
}

/// What a sender that has connected has sent.
enum Came {
    Parcel(Parcel),
    /// It has gone without sending one, or sent what is none.
    Nothing,
    NotYet,
}

fn taken(from: BorrowedFd<'_>, pid: u32) -> Came {
    let mut bytes = [0u8; 8 * WORDS_MAX];
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let came = match recvmsg(from, &mut into, &mut control, flags) {
        Ok(came) => came,
        Err(Errno::AGAIN | Errno::INTR) => return Came::NotYet,
        Err(_) => return Came::Nothing,
    };
    let files: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(some) => Some(some),
            _ => None,
        })
        .flatten()
        .collect();
    let is_cut = ReturnFlags::TRUNC | ReturnFlags::CTRUNC;
    if came.flags.intersects(is_cut) || came.bytes == 0 {
        return Came::Nothing;
    }
    let words = bytes[..came.bytes.min(8 * WORDS_MAX)].chunks_exact(8);
    let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
    Came::Parcel(Parcel {
        pid,
        words: words.map(word).collect(),
        files,
    })
}

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// A connection to the socket of a process of the job, which is seen to be at the other end.
fn connected(job: u64, pid: u32) -> io::Result<OwnedFd> {
    let to = socket()?;
    connect(&to, &address(job, pid)?)?;
    match sys::socket_peer(to.as_raw_fd()) {
        Some(peer) if peer.pid == pid && is_of_this_user(&peer) => Ok(to),
        other => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            match other {
                Some(SocketPeer { pid: other, uid }) => format!(
                    "the name of the socket of process {pid} is taken by process {other} of user {uid}"
                ),
                None => format!("the name of the socket of process {pid} is taken by another"),
            },
        )),
    }
}

fn is_of_this_user(peer: &SocketPeer) -> bool {
    peer.uid == sys::user()
}

/// A name that no file has: it goes with the socket.
fn address(job: u64, pid: u32) -> io::Result<SocketAddrUnix> {
    let name = format!("anabranch-{job:016x}-{pid}");
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    /// Two jobs of the test's own: this process has a socket in each.
    fn pair(test: u64) -> (Parcels, Parcels) {
        let open = |which| {
            let (job, pid) = of(test, which);
            Parcels::open(job, pid).expect("opened")
        };
        (open(1), open(2))
    }

    fn of(test: u64, which: u64) -> (u64, u32) {
        let pid = std::process::id();
        ((test << 4 | which) << 32 | u64::from(pid), pid)
    }

    fn file(text: &str) -> File {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(text.as_bytes()).expect("written");
        file.rewind().expect("at its start");
        file
    }

    #[test]
    fn files_come_with_what_is_said_of_them() {
        let (one, mut two) = pair(1);
        assert!(two.receive().expect("asked").is_none());
        let files = [file("first"), file("second")];
        let lent = files.each_ref().map(AsFd::as_fd);
        one.send(of(1, 2), &[7, u64::MAX], &lent).expect("sent");
        one.send(of(1, 2), &[9], &[]).expect("sent");
        assert!(one.send(of(1, 2), &[], &lent).is_err());
        let parcel = two.receive().expect("asked").expect("one");
        assert_eq!(parcel.pid, std::process::id());
        assert_eq!(parcel.words, [7, u64::MAX]);
        let texts = parcel.files.into_iter().map(|fd| {
            let flags = rustix::io::fcntl_getfd(&fd).expect("open");
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
            let mut text = String::new();
            File::from(fd).read_to_string(&mut text).expect("read");
            text
        });
        assert!(texts.eq(["first", "second"]));
        let bare = two.receive().expect("asked").expect("another");
        assert!(bare.words == [9] && bare.files.is_empty());
        assert!(two.receive().expect("asked").is_none());
    }

    #[test]
    fn nobody_waits() {
        let (one, mut two) = pair(2);
        assert!(
            one.send(of(2, 3), &[1], &[]).is_err(),
            "nobody has that name"
        );
        // A queue that nobody empties is full at some time; what is in it arrives.
        let sent = (0..100_000).take_while(|at| one.send(of(2, 2), &[*at], &[]).is_ok());
        let sent = sent.count();
        assert!(sent < 100_000);
        for at in 0..sent as u64 {
            assert_eq!(two.receive().expect("asked").expect("one").words, [at]);
        }
        assert!(two.receive().expect("asked").is_none());
        one.send(of(2, 2), &[5], &[]).expect("there is room again");
    }

    #[test]
    fn no_parcel_has_more_than_the_kernel_takes() {
        let (one, mut two) = pair(3);
        let files: Vec<File> = (0..FILES_MAX + 1).map(|_| file("x")).collect();
        let lent: Vec<BorrowedFd> = files.iter().map(AsFd::as_fd).collect();
        let words = [0; WORDS_MAX];
        one.send(of(3, 2), &words, &lent[..FILES_MAX])
            .expect("sent");
        let parcel = two.receive().expect("asked").expect("one");
        assert_eq!(
            (parcel.words.len(), parcel.files.len()),
            (WORDS_MAX, FILES_MAX)
        );
        assert!(one.send(of(3, 2), &words, &lent).is_err());
        assert!(one.send(of(3, 2), &[0; WORDS_MAX + 1], &[]).is_err());
        // A name is one socket's.
        assert!(Parcels::open(of(3, 2).0, of(3, 2).1).is_err());
    }
    #[test]
    fn who_has_connected_and_not_sent_yet_is_heard_later() {
        let (one, mut two) = pair(4);
        let (job, pid) = of(4, 2);
        let slow: Vec<OwnedFd> = (0..LATE_MAX + 1)
            .map(|_| connected(job, pid).expect("connected"))
            .collect();
        assert!(two.receive().expect("asked").is_none());
        assert_eq!(two.late.len(), LATE_MAX, "the oldest is not waited for");
        one.send((job, pid), &[1], &[]).expect("sent");
        assert_eq!(two.receive().expect("asked").expect("one").words, [1]);
        let word = 2u64.to_ne_bytes();
        rustix::net::send(&slow[2], &word, SendFlags::DONTWAIT).expect("sent");
        assert_eq!(two.receive().expect("asked").expect("one").words, [2]);
        drop(slow);
        assert!(two.receive().expect("asked").is_none());
        assert!(two.late.is_empty(), "they have gone");
    }

    const HAS_NAME: &str = "ANABRANCH_TEST_HAS_NAME";
    const SENDS: &str = "ANABRANCH_TEST_SENDS";

    /// Not a test of its own: what the test binary does as a process of another user.
    #[test]
    fn other_user() {
        let number = |name| -> Option<u64> { std::env::var(name).ok()?.parse().ok() };
        let pid = std::os::unix::process::parent_id();
        if let Some(job) = number(HAS_NAME) {
            let mut socket = Parcels::open(job, pid).expect("the name was free");
            println!("@there");
            std::io::stdin()
                .read_line(&mut String::new())
                .expect("told");
            let came = socket.receive().expect("asked").is_some();
            println!("@{}", if came { "got it" } else { "nothing" });
        }
        if let Some(job) = number(SENDS) {
            let to = socket().expect("a socket");
            let address = address(job, pid).expect("a name");
            connect(&to, &address).expect("anybody may connect");
            // Refused if the other end has gone already.
            let _ = rustix::net::send(&to, &[7; 8], SendFlags::NOSIGNAL);
            println!("@sent");
        }
    }

    /// Whoever is first has the name of a socket, and anybody may connect to it.
    #[test]
    fn processes_of_another_user_get_and_give_nothing() {
        use crate::node::other_user::OtherUser;
        let (one, mut two) = pair(5);
        let Some(mut thief) = OtherUser::start(module_path!(), HAS_NAME, of(5, 3).0) else {
            return;
        };
        thief.expect("there");
        let secret = file("secret");
        let error = one
            .send(of(5, 3), &[1], &[secret.as_fd()])
            .expect_err("not to another user");
        let said = format!("taken by process {} of user {}", thief.pid(), thief.uid());
        assert!(error.to_string().ends_with(&said), "{error}");
        thief.tell();
        thief.expect("nothing");

        let mut liar = OtherUser::start(module_path!(), SENDS, of(5, 2).0).expect("root");
        liar.expect("sent");
        assert!(two.receive().expect("asked").is_none());
        assert!(two.late.is_empty());
        one.send(of(5, 2), &[8], &[]).expect("sent");
        assert_eq!(two.receive().expect("asked").expect("one").words, [8]);
    }
}
