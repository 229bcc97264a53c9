//! Coordination of the processes on a machine that load the same weights.
//!
//! Pages of a file are charged to the control group of the process that touches them first, and stay charged to it, no
//! matter which process maps them later. A process whose limit has no room for the weights must therefore come second:
//! alone it would be kept below its limit by having pages reclaimed, one after the other, at each token. Processes in
//! different containers share neither a network nor a writable directory, but they have the file, so they signal each
//! other through read locks on two bytes far beyond its end. The kernel releases such locks when a process ends,
//! however it ends.
//!
//! Pages are also allocated on the NUMA node of the thread that touches them first. If the plan names nodes for them,
//! then of several processes that could read the weights first only one does: the holder of the claim on the file. It
//! releases the claim once it has read them.

use std::fs::File;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// Far beyond the end of any file, so as not to conflict with another program's locks.
const FIRST_BYTE: i64 = 1 << 60;
/// File system types of SMB, from `statfs` (`linux/magic.h`).
const SMB: [u64; 3] = [0x517b, 0xff53_4d42, 0xfe53_4d42];

/// A weights file that several processes map.
#[derive(Debug)]
pub struct WeightFile {
    file: File,
    /// Byte that is locked while weights are in memory; the next byte is locked while they are being read.
    at: i64,
}

/// Extent to which other processes have loaded the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// No process has loaded them or is reading them.
    Nowhere,
    /// A process is reading them.
    Loading,
    /// A process has touched all of them.
    Loaded,
}

impl WeightFile {
    /// Opens the file. `whose` identifies this boot of this machine (`/proc/sys/kernel/random/boot_id`), since other machines
    /// also see the locks on a shared file system, but do not share our memory; and the model, since others may have the file.
    ///
    /// # Errors
    /// An error if it cannot be opened.
    pub fn open(path: &Path, whose: &str) -> io::Result<Self> {
        let hasher = BuildHasherDefault::<DefaultHasher>::default();
        let place = i64::from(hasher.hash_one(whose) as u32) * 2;
        Ok(Self {
            file: File::open(path)?,
            at: FIRST_BYTE + place,
        })
    }

    /// Returns the state that other processes signal.
    ///
    /// # Errors
    /// An error if the file system does not support locks.
    pub fn held(&self) -> io::Result<Held> {
        if self.is_locked(self.at)? {
            return Ok(Held::Loaded);
        }
        Ok(match self.is_locked(self.at + 1)? {
            true => Held::Loading,
            false => Held::Nowhere,
        })
    }

    /// Signals, for as long as this value lives, that this process is reading the weights into memory charged to it.
    ///
    /// # Errors
    /// An error if the file system does not support locks.
    pub fn say_loading(&self) -> io::Result<()> {
        self.lock(self.at + 1)
    }

    /// Signals, for as long as this value lives, that all weights are in memory.
    ///
    /// # Errors
    /// An error if the file system does not support locks.
    pub fn say_loaded(&self) -> io::Result<()> {
        self.lock(self.at)
    }

    /// Tries to claim placement of the weights for this process, until it releases the claim or this value is dropped;
    /// no other process can have it in the meantime. Returns whether this process has it.
    ///
    /// # Errors
    /// An error if the file system does not support such locks on files open for reading, or if, like SMB, it keeps
    /// other machines from reading locked files.
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

    /// Releases the claim, if this process has it.
    ///
    /// # Errors
    /// An error if the file system does not support such locks.
    pub fn release_claim(&self) -> io::Result<()> {
        Ok(flock(&self.file, FlockOperation::Unlock)?)
    }

    fn lock(&self, at: i64) -> io::Result<()> {
        self.control(libc::F_OFD_SETLK, &mut byte(libc::F_RDLCK, at))
    }

    /// Tests for a conflicting lock by querying an exclusive one, without taking it.
    fn is_locked(&self, at: i64) -> io::Result<bool> {
        let mut lock = byte(libc::F_WRLCK, at);
        self.control(libc::F_OFD_GETLK, &mut lock)?;
        Ok(i32::from(lock.l_type) != libc::F_UNLCK)
    }

    fn control(&self, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
        // SAFETY: the descriptor is open as long as `self`, and the kernel accesses only the one struct, which
        // outlives the call.
        let status =
            unsafe { libc::fcntl(self.file.as_raw_fd(), command, std::ptr::from_mut(lock)) };
        if status == -1 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// Describes a lock on one byte.
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
        // A query is invisible to others, a lock to the process that holds it, and locks from another boot do not count.
        assert_eq!(holder.held().unwrap(), Held::Nowhere);
        assert_eq!(open("after a reboot").held().unwrap(), Held::Nowhere);
        assert_eq!(third.held().unwrap(), Held::Loaded);
        drop(holder);
        assert_eq!(second.held().unwrap(), Held::Nowhere);
    }
}
