//! Sends file descriptors from rank to rank, over a socket that each rank has once it uses a GPU.
//!
//! Nobody waits: what does not fit into the other's queue is not sent, and what has not come is not there.
//! The kernel says who sent a parcel; parcels of other users are thrown away.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{
    bind, recvmsg, sendmsg_addr, socket_with, AddressFamily, RecvAncillaryBuffer,
    RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Files in one parcel at most: the kernel takes 253.
pub const FILES_MAX: usize = 128;
/// Words beside them at most.
const WORDS_MAX: usize = 4 + 2 * FILES_MAX;
/// Room for them, in 8-byte words so that it is aligned.
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(FILES_MAX), ScmCredentials(1));

/// This rank's socket.
#[derive(Debug)]
pub struct Parcels {
    socket: OwnedFd,
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
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        set_socket_passcred(&socket, true)?;
        bind(&socket, &address(job, pid)?)?;
        Ok(Parcels { socket })
    }

    /// Sends files to a process of the job, of which `words` say what they are.
    ///
    /// # Errors
    /// It has no socket, or its queue is full.
    pub fn send(
        &self,
        (job, pid): (u64, u32),
        words: &[u64],
        files: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        if files.len() > FILES_MAX || words.len() > WORDS_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let to = address(job, pid)?;
        sendmsg_addr(
            &self.socket,
            &to,
            &[IoSlice::new(&bytes)],
            &mut control,
            flags,
        )?;
        Ok(())
    }

    /// The next parcel from a process of the same user, if one has come. Others are thrown away.
    ///
    /// # Errors
    /// The system's.
    pub fn receive(&self) -> io::Result<Option<Parcel>> {
        // Bounded: a process that keeps sending parcels of other users keeps nobody busy for ever.
        for _ in 0..FILES_MAX {
            let mut bytes = [0u8; 8 * WORDS_MAX];
            let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut into = [IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let came = match recvmsg(self.socket.as_fd(), &mut into, &mut control, flags) {
                Ok(came) => came,
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            let (mut files, mut from) = (Vec::new(), None);
            for message in control.drain() {
                match message {
                    RecvAncillaryMessage::ScmRights(some) => files.extend(some),
                    RecvAncillaryMessage::ScmCredentials(credentials) => from = Some(credentials),
                    _ => {}
                }
            }
            let is_whole = !came
                .flags
                .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
            let is_of_user = |user: rustix::process::Uid| user == rustix::process::geteuid();
            let Some(from) = from.filter(|from| is_whole && is_of_user(from.uid)) else {
                continue;
            };
            let words = bytes[..came.bytes.min(8 * WORDS_MAX)].chunks_exact(8);
            let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
            return Ok(Some(Parcel {
                pid: from.pid.as_raw_nonzero().get().unsigned_abs(),
                words: words.map(word).collect(),
                files,
            }));
        }
        Ok(None)
    }
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

    /// Jobs of the tests' own; their sockets have pids that are none.
    fn pair(job: u64) -> (Parcels, Parcels) {
        let job = job << 32 | u64::from(std::process::id());
        let open = |pid| Parcels::open(job, pid).expect("opened");
        (open(1), open(2))
    }

    fn of(job: u64, pid: u32) -> (u64, u32) {
        (job << 32 | u64::from(std::process::id()), pid)
    }

    fn file(text: &str) -> File {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(text.as_bytes()).expect("written");
        file.rewind().expect("at its start");
        file
    }

    #[test]
    fn files_come_with_what_is_said_of_them() {
        let (one, two) = pair(1);
        assert!(two.receive().expect("asked").is_none());
        let files = [file("first"), file("second")];
        let lent = files.each_ref().map(AsFd::as_fd);
        one.send(of(1, 2), &[7, u64::MAX], &lent).expect("sent");
        one.send(of(1, 2), &[], &[]).expect("sent");
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
        let empty = two.receive().expect("asked").expect("another");
        assert!(empty.words.is_empty() && empty.files.is_empty());
        assert!(two.receive().expect("asked").is_none());
    }

    #[test]
    fn nobody_waits() {
        let (one, two) = pair(2);
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
        let (one, two) = pair(3);
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
        assert!(Parcels::open(of(3, 2).0, 2).is_err());
    }
}
