//! The few system calls of this part, each with its error as `io::Error`.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

use rustix::fs::{FlockOperation, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;
use rustix::thread::futex;

/// File descriptors below this number stay the program's.
pub const FD_MINIMUM: RawFd = 500;

/// Identifies an open file, whatever happens to the number of its file descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
}

impl FileIdentity {
    /// True if this is the file with these numbers.
    pub fn is(&self, device: u64, inode: u64) -> bool {
        self.device == device && self.inode == inode
    }
}

/// `fstat` of a file descriptor, reduced to what is used here.
#[derive(Debug, Clone, Copy)]
pub struct FileStat {
    /// Device and inode.
    pub identity: FileIdentity,
    /// Size in bytes.
    pub size: u64,
    /// Owner.
    pub uid: u32,
    /// Type and permission bits.
    pub mode: u32,
    /// Names that the file has.
    pub links: u64,
}

impl FileStat {
    /// A file of this user's that no other user may open.
    pub fn is_private(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFREG && self.mode & 0o077 == 0 && self.uid == user()
    }
}

/// `fstat` by number: for file descriptors that the program may have closed behind our back.
pub fn file_stat(fd: RawFd) -> io::Result<FileStat> {
    // SAFETY: for fstat only, which reports a number that stands for no file as an error.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let stat = rustix::fs::fstat(fd)?;
    Ok(FileStat {
        identity: FileIdentity {
            device: stat.st_dev,
            inode: stat.st_ino,
        },
        size: u64::try_from(stat.st_size).unwrap_or(0),
        uid: stat.st_uid,
        mode: stat.st_mode,
        links: stat.st_nlink as u64,
    })
}

/// A file descriptor that the program may close, reusing its number ("close everything above 2" loops). It is
/// checked by inode before each use, so that no call of ours ever hits a file of the program's.
#[derive(Debug)]
pub struct GuardedFd {
    number: RawFd,
    identity: FileIdentity,
}

impl GuardedFd {
    /// Takes `fd` over, moved to a number of at least `minimum` if there is one free.
    pub fn new(fd: OwnedFd, minimum: RawFd) -> io::Result<Self> {
        let identity = file_stat(fd.as_raw_fd())?.identity;
        let high = rustix::io::fcntl_dupfd_cloexec(&fd, minimum);
        let number = high.unwrap_or(fd).into_raw_fd();
        Ok(Self { number, identity })
    }

    /// Its number, as others see it in `/proc/<pid>/fd`.
    pub fn number(&self) -> RawFd {
        self.number
    }

    /// The file descriptor, if the number still stands for our file.
    pub fn get(&self) -> io::Result<BorrowedFd<'_>> {
        if file_stat(self.number)?.identity != self.identity {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        // SAFETY: the number was just seen to stand for our open file, which only Drop closes.
        Ok(unsafe { BorrowedFd::borrow_raw(self.number) })
    }

    /// Device and inode of the file.
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }
}

impl Drop for GuardedFd {
    fn drop(&mut self) {
        if self.get().is_ok() {
            // SAFETY: the number stands for our own file, and nothing borrows it any more.
            unsafe { libc::close(self.number) };
        }
    }
}

/// A sealable, close-on-exec memfd.
pub fn memfd(name: &CStr) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // From Linux 6.3 on: not executable; older kernels refuse the flag.
    let fd = rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| rustix::fs::memfd_create(name, flags));
    let fd = fd?;
    // It has no name, and /proc shows it to processes of this user alone; but its mode would let in everybody.
    rustix::fs::fchmod(&fd, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    Ok(fd)
}

/// Allocates `length` bytes from `offset` on, so that touching them cannot raise SIGBUS. Sizes in bytes.
pub fn allocate(fd: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<()> {
    let too_large = |_| io::Error::from_raw_os_error(libc::EFBIG);
    let offset = libc::off_t::try_from(offset).map_err(too_large)?;
    let length = libc::off_t::try_from(length).map_err(too_large)?;
    for _ in 0..16 {
        // SAFETY: plain system call on an open file descriptor; it returns the error number.
        match unsafe { libc::posix_fallocate(fd.as_raw_fd(), offset, length) } {
            0 => return Ok(()),
            libc::EINTR => {}
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
    Err(io::Error::from_raw_os_error(libc::EINTR))
}

/// Forbids the file to shrink, to grow, and to be sealed otherwise.
pub fn seal_size(fd: BorrowedFd<'_>) -> io::Result<()> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    Ok(rustix::fs::fcntl_add_seals(fd, seals)?)
}

/// True if the file can never shrink below what a mapping of it covers.
pub fn is_shrink_sealed(fd: BorrowedFd<'_>) -> bool {
    // Files without seals give an error.
    rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

/// `flock`, never blocking. True if the lock was had, false if others hold it.
pub fn try_lock(fd: BorrowedFd<'_>, exclusive: bool) -> io::Result<bool> {
    let how = match exclusive {
        true => FlockOperation::NonBlockingLockExclusive,
        false => FlockOperation::NonBlockingLockShared,
    };
    match rustix::fs::flock(fd, how) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Gives the `flock` back.
pub fn unlock(fd: BorrowedFd<'_>) {
    // Giving back what is not held is no error.
    let _ = rustix::fs::flock(fd, FlockOperation::Unlock);
}

/// The process at the other end of a Unix socket, as it was when the socket was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketPeer {
    /// Pid, as this process sees it.
    pub pid: u32,
    /// Effective user.
    pub uid: u32,
}

/// Who is at the other end of a Unix socket. `None`: it is no such socket, or a process of a pid namespace
/// that this one does not see.
pub fn socket_peer(fd: RawFd) -> Option<SocketPeer> {
    // SAFETY: all-zero is a valid ucred (plain integers).
    let mut peer: libc::ucred = unsafe { std::mem::zeroed() };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).ok()?;
    // By libc: rustix takes a pid for one that is not 0, but that is how a process of another namespace is told.
    // SAFETY: the buffer and its length belong together; a number that is no socket gives an error.
    let result = unsafe {
        let option = libc::SO_PEERCRED;
        let to = (&raw mut peer).cast();
        libc::getsockopt(fd, libc::SOL_SOCKET, option, to, &raw mut length)
    };
    let pid = u32::try_from(peer.pid).ok().filter(|&pid| pid > 0)?;
    (result == 0).then_some(SocketPeer { pid, uid: peer.uid })
}

/// Effective user id.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// 64 random bits from the kernel; before its pool is ready, bits from the clock and the pid.
pub fn random_u64() -> u64 {
    let mut bytes = [0; size_of::<u64>()];
    let got = rustix::rand::getrandom(&mut bytes, GetRandomFlags::NONBLOCK);
    if got == Ok(bytes.len()) {
        return u64::from_ne_bytes(bytes);
    }
    let clock = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    clock.as_nanos() as u64 ^ (u64::from(std::process::id()) << 40)
}

/// The high half of a word, for the system, which compares it and sleeps.
fn high_half(word: &AtomicU64) -> &AtomicU32 {
    let first: *mut u32 = word.as_ptr().cast();
    let high = first.wrapping_add(usize::from(cfg!(target_endian = "little")));
    // SAFETY: a half of the word, aligned, which lives as long. Only the system reads it, and not as part of
    // this program's memory model.
    unsafe { AtomicU32::from_ptr(high) }
}

/// Sleeps while the high half of `*word` is `seen`, at most `timeout`. The word may lie in memory shared
/// between processes.
pub fn futex_wait_high(word: &AtomicU64, seen: u32, timeout: Duration) {
    let timeout = futex::Timespec::try_from(timeout).ok();
    // A wake-up, a timeout and a changed value all just return.
    let _ = futex::wait(
        high_half(word),
        futex::Flags::empty(),
        seen,
        timeout.as_ref(),
    );
}

/// Wakes everyone who sleeps on the high half of the word, in any process.
pub fn futex_wake_high(word: &AtomicU64) {
    let _ = futex::wake(high_half(word), futex::Flags::empty(), i32::MAX as u32);
}

/// Bytes of this process's own memory, or `None` if no readable memory is mapped there.
pub fn read_own<const N: usize>(address: usize) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let to = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: N,
    };
    let from = libc::iovec {
        iov_base: std::ptr::without_provenance_mut(address),
        iov_len: N,
    };
    // SAFETY: one range of `N` writable bytes; the system reads the other, and says so if it cannot.
    let read =
        unsafe { libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0) };
    (usize::try_from(read) == Ok(N)).then_some(bytes)
}
