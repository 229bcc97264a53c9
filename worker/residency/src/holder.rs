//! Which process of a machine has brought the weights into memory.
//!
//! Pages of a file are charged to the control group of the process that touches them first, and stay charged to it, whoever
//! maps them later. A process whose limit has no room for the weights must therefore come second: alone it would be kept
//! below its limit by having the pages taken away again, one after the other, at each token. Processes of several containers
//! share neither a network nor a directory that they may write to, but they have the file, so they tell each other by
//! read locks on two bytes far behind its end. The kernel gives such locks up when a process ends, however it ends.
//!
//! Pages also lie on the NUMA node of the thread that touches them first, so of several processes that could read the
//! weights first only one does, where the plan says on which nodes they are to lie: the one with the claim on the file. It gives the
//! claim up when it has read them.

use std::fs::File;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// Far behind the end of any file, so that no lock of another program is met.
const FIRST_BYTE: i64 = 1 << 60;
/// Types of SMB file systems, by `statfs` (`linux/magic.h`).
const SMB: [u64; 3] = [0x517b, 0xff53_4d42, 0xfe53_4d42];

/// A file of weights that several processes map.
#[derive(Debug)]
pub struct WeightFile {
    file: File,
    /// The byte that is locked while weights are in memory; the next one is while they are being read.
    at: i64,
}

/// How far the weights are in memory, by other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// No process has them or reads them.
    Nowhere,
    /// A process reads them.
    Loading,
    /// A process has touched all of them.
    Loaded,
}

impl WeightFile {
    /// Opens the file. `boot` is of this machine and of its uptime (`/proc/sys/kernel/random/boot_id`): locks on a shared
    /// file system are seen by other machines too, whose memory is none of ours.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(path: &Path, boot: &str) -> io::Result<Self> {
        let hasher = BuildHasherDefault::<DefaultHasher>::default();
        let place = i64::from(hasher.hash_one(boot) as u32) * 2;
        Ok(Self {
            file: File::open(path)?,
            at: FIRST_BYTE + place,
        })
    }

    /// What other processes say.
    ///
    /// # Errors
    /// When the file system has no locks.
    pub fn held(&self) -> io::Result<Held> {
        if self.is_locked(self.at)? {
            return Ok(Held::Loaded);
        }
        Ok(match self.is_locked(self.at + 1)? {
            true => Held::Loading,
            false => Held::Nowhere,
        })
    }

    /// Says for as long as this value lives that the weights are being read into memory, which is charged to this process.
    ///
    /// # Errors
    /// When the file system has no locks.
    pub fn say_loading(&self) -> io::Result<()> {
        self.lock(self.at + 1)
    }

    /// Says for as long as this value lives that all weights are in memory.
    ///
    /// # Errors
    /// When the file system has no locks.
    pub fn say_loaded(&self) -> io::Result<()> {
        self.lock(self.at)
    }

    /// Makes this process the one that places the weights, until it releases the claim or this value ends: no other has it
    /// meanwhile. Tells whether it has it.
    ///
    /// # Errors
    /// When the file system has no such locks for files that are open for reading, or keeps other machines from reading
    /// what is locked, as SMB does.
    pub fn claim(&self) -> io::Result<bool> {
        if SMB.contains(&(rustix::fs::fstatfs(&self.file)?.f_type as u64)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        match flock(&self.file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Gives the claim up, if this process has it.
    ///
    /// # Errors
    /// When the file system has no such locks.
    pub fn release_claim(&self) -> io::Result<()> {
        Ok(flock(&self.file, FlockOperation::Unlock)?)
    }

    fn lock(&self, at: i64) -> io::Result<()> {
        self.control(libc::F_OFD_SETLK, &mut byte(libc::F_RDLCK, at))
    }

    /// Asks for the lock that no other lock goes with, without taking it.
    fn is_locked(&self, at: i64) -> io::Result<bool> {
        let mut lock = byte(libc::F_WRLCK, at);
        self.control(libc::F_OFD_GETLK, &mut lock)?;
        Ok(i32::from(lock.l_type) != libc::F_UNLCK)
    }

    fn control(&self, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
        // SAFETY: the descriptor is open as long as `self`, and the kernel reads and writes the one struct, which it outlives.
        let status =
            unsafe { libc::fcntl(self.file.as_raw_fd(), command, std::ptr::from_mut(lock)) };
        if status == -1 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// A lock of one byte.
fn byte(kind: libc::c_int, at: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: at,
        l_len: 1,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_has_the_claim() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || WeightFile::open(file.path(), "boot").unwrap();
        let (first, second) = (open(), open());
        assert!(first.claim().unwrap());
        assert!(first.claim().unwrap(), "it keeps it");
        assert!(!second.claim().unwrap());
        first.release_claim().unwrap();
        assert!(second.claim().unwrap());
        first.release_claim().unwrap();
        assert!(!first.claim().unwrap(), "it is the second's");
        drop(second);
        assert!(first.claim().unwrap());
    }

    #[test]
    fn what_one_says_the_others_hear_until_it_ends() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = |boot| WeightFile::open(file.path(), boot).unwrap();
        let (holder, second, third) = (open("boot"), open("boot"), open("boot"));
        assert_eq!(second.held().unwrap(), Held::Nowhere);
        holder.say_loading().unwrap();
        assert_eq!(second.held().unwrap(), Held::Loading);
        holder.say_loaded().unwrap();
        assert_eq!(second.held().unwrap(), Held::Loaded);
        // Who only asks is heard by nobody, not by itself either, and another machine's words do not count.
        assert_eq!(holder.held().unwrap(), Held::Nowhere);
        assert_eq!(open("after a reboot").held().unwrap(), Held::Nowhere);
        assert_eq!(third.held().unwrap(), Held::Loaded);
        drop(holder);
        assert_eq!(second.held().unwrap(), Held::Nowhere);
    }
}
