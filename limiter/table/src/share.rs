//! A container's limits and usage, as a process finds them.

use core::{
    ffi::{CStr, c_void},
    ptr,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, Ordering},
};

use crate::{
    limits::{Limits, MAX_GPUS},
    log, process,
    sys::{self, O_CREAT_EXCL, O_NOFOLLOW, O_RDONLY_CLOEXEC, O_RDWR_CLOEXEC},
    table::{LENGTH, MAGIC, Owner, UsageTable, Word},
};

/// The limits file in a container, mounted read-only.
pub const LIMITS: &CStr = c"/usr/lib/gpufence/limits";
/// The usage file, on a small tmpfs of the container's own.
pub const USAGE: &CStr = c"/usr/lib/gpufence/usage/table";
/// A limits file of 64 GPUs has some 8 KiB.
const MAX_LIMITS_BYTES: usize = 16 << 10;

/// Whether and how this process is limited.
#[derive(Debug, Clone, Copy)]
pub enum State {
    /// There is no limits file: everything goes through.
    Transparent,
    /// There is one.
    Limited(&'static Share),
    /// There is one, but the limiter can't do its work. By the file: let through, or not.
    Failed {
        /// Whether allocations go through.
        allow: bool,
    },
}

/// What belongs to this process alone: zeros again in a child after fork, which then claims a slot of its own.
#[repr(C)]
#[derive(Debug)]
pub struct Own {
    /// One more than the number of its slot; 0: none yet.
    slot: AtomicU32,
    /// Held for a few instructions by one of its threads.
    lock: AtomicU32,
    /// The library's own book, which the lock guards.
    pub book: AtomicPtr<c_void>,
    /// Which of the limits' GPUs the device of a number is, and one; 0: not yet known.
    pub devices: [AtomicU8; MAX_GPUS],
}

const OWN_BYTES: usize = 4096;

/// A container's limits and usage.
#[derive(Debug)]
pub struct Share {
    /// What the file says.
    pub limits: Limits,
    /// What all processes hold.
    pub table: &'static UsageTable,
    /// What is this process's alone.
    pub own: &'static Own,
}

static SHARE: AtomicPtr<Share> = AtomicPtr::new(ptr::null_mut());
static KNOWN: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
const TRANSPARENT: u8 = 1;
const DENY: u8 = 2;
const ALLOW: u8 = 3;

/// How this process is limited: found out once, and the same ever after.
pub fn state() -> State {
    let share = SHARE.load(Ordering::Acquire);
    // SAFETY: once published it is never changed or unmapped.
    if let Some(share) = unsafe { share.as_ref() } {
        return State::Limited(share);
    }
    match KNOWN.load(Ordering::Acquire) {
        TRANSPARENT => State::Transparent,
        DENY => State::Failed { allow: false },
        ALLOW => State::Failed { allow: true },
        _ => find(),
    }
}

/// Two threads may both come here; the first to publish wins, and no lock can be left held by a fork.
#[cold]
fn find() -> State {
    static SAID: AtomicBool = AtomicBool::new(false);
    let failed = |allow: bool, parts: &[&str]| {
        log::once(&SAID, parts);
        KNOWN.store(if allow { ALLOW } else { DENY }, Ordering::Release);
        State::Failed { allow }
    };
    let file = match sys::open(LIMITS, O_RDONLY_CLOEXEC, 0) {
        Ok(file) => file,
        Err(-2 | -20) => {
            KNOWN.store(TRANSPARENT, Ordering::Release);
            return State::Transparent;
        }
        Err(_) => return failed(false, &["/usr/lib/gpufence/limits can't be opened; GPU memory is denied"]),
    };
    let mut buffer = [0_u8; MAX_LIMITS_BYTES];
    let Some(limits) = file.read(&mut buffer).ok().and_then(Limits::read) else {
        return failed(false, &["/usr/lib/gpufence/limits is not a limits file; GPU memory is denied"]);
    };
    let allow = limits.allow_on_failure;
    let does = if allow { "GPU memory isn't limited" } else { "GPU memory is denied" };
    let Some(table) = map_table(USAGE) else {
        return failed(allow, &["/usr/lib/gpufence/usage can't be used; ", does]);
    };
    let own = sys::map_wiped_on_fork(OWN_BYTES);
    let place = sys::map_private(size_of::<Share>());
    let (Some(own), Some(place)) = (own, place) else {
        return failed(allow, &["no memory for the limiter; ", does]);
    };
    let place = place.cast::<Share>();
    // SAFETY: page-aligned memory of zeros, large enough, which lives as long as the process; zeros are an `Own`.
    let share = unsafe {
        place.write(Share { limits, table, own: &*own.cast::<Own>() });
        &*place
    };
    match SHARE.compare_exchange(ptr::null_mut(), place, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => State::Limited(share),
        Err(first) => {
            sys::unmap(own, OWN_BYTES);
            sys::unmap(ptr::from_ref(share.table).cast_mut().cast(), LENGTH);
            sys::unmap(place.cast(), size_of::<Share>());
            // SAFETY: as above.
            State::Limited(unsafe { &*first })
        }
    }
}

/// Opens or makes the usage file and maps it.
fn map_table(path: &CStr) -> Option<&'static UsageTable> {
    let open = || sys::open(path, O_RDWR_CLOEXEC | O_NOFOLLOW, 0);
    let file = match open() {
        Ok(file) => file,
        Err(-2) => match sys::open(path, O_RDWR_CLOEXEC | O_NOFOLLOW | O_CREAT_EXCL, 0o666) {
            Ok(file) => {
                // Processes of other users share it, whatever this one's umask.
                file.set_mode(0o666);
                file
            }
            // Another process was quicker.
            Err(-17) => open().ok()?,
            Err(_) => return None,
        },
        Err(_) => return None,
    };
    // Longer only if somebody made it so, and never shorter while it is in use: everyone sets the same length.
    if file.device_and_length().ok()?.1 < LENGTH as u64 && file.set_length(LENGTH) < 0 {
        return None;
    }
    let memory = file.map(LENGTH)?;
    // SAFETY: page-aligned shared memory of that length; the table is atomics only, and any bytes are one.
    let table = unsafe { &*memory.cast::<UsageTable>() };
    table.magic.swap_if(0, MAGIC);
    if table.magic.get() == MAGIC {
        return Some(table);
    }
    sys::unmap(memory, LENGTH);
    None
}

impl Share {
    /// Runs with this process's lock held. It is never held across a call of the driver.
    pub fn locked<T>(&self, work: impl FnOnce() -> T) -> T {
        let mut spins = 0_u32;
        while self.own.lock.compare_exchange_weak(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            spins += 1;
            if spins > 100 {
                sys::yield_now();
            } else {
                core::hint::spin_loop();
            }
        }
        let result = work();
        self.own.lock.store(0, Ordering::Release);
        result
    }

    /// The number of this process's slot. `None`: the table is full, or there is no /proc.
    pub fn slot(&self) -> Option<usize> {
        match self.own.slot.load(Ordering::Acquire) {
            0 => self.claim(),
            number => Some(number as usize - 1),
        }
    }

    #[cold]
    fn claim(&self) -> Option<usize> {
        static SAID: AtomicBool = AtomicBool::new(false);
        let slot = process::current().and_then(|owner| {
            self.locked(|| {
                let known = self.own.slot.load(Ordering::Acquire);
                if known != 0 {
                    return Some(known as usize - 1);
                }
                let slot = self.table.claim(&owner, &process::is_alive)?;
                self.own.slot.store(u32::try_from(slot).ok()? + 1, Ordering::Release);
                Some(slot)
            })
        });
        if slot.is_none() {
            let does = if self.limits.allow_on_failure { "it isn't limited" } else { "GPU memory is denied" };
            log::once(&SAID, &["no place in the usage table for this process; ", does]);
        }
        slot
    }

    /// Reserves `size` bytes of a GPU. Where that fails, what dead processes held is given back first.
    pub fn reserve(&self, gpu: usize, size: u64) -> bool {
        let Some(slot) = self.slot() else { return self.limits.allow_on_failure };
        let limit = self.limits.gpus()[gpu].memory;
        self.table.reserve(slot, gpu, size, limit)
            || (self.empty_dead() > 0 && self.table.reserve(slot, gpu, size, limit))
    }

    /// Gives back what was reserved.
    pub fn give_back(&self, gpu: usize, size: u64) {
        if let Some(slot) = self.slot() {
            self.table.give_back(slot, gpu, size);
        }
    }

    /// Counts an allocation that was denied.
    pub fn denied(&self, gpu: usize) {
        self.table.gpus[gpu].denied.add(1);
    }

    /// Bytes that the living processes hold of a GPU.
    pub fn used(&self, gpu: usize) -> u64 {
        self.empty_dead();
        self.table.held(gpu)
    }

    fn empty_dead(&self) -> usize {
        process::current().map_or(0, |owner: Owner| self.table.empty_dead(&owner, &process::is_alive))
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use super::*;

    fn path(folder: &tempfile::TempDir) -> CString {
        CString::new(folder.path().join("table").into_os_string().into_encoded_bytes()).unwrap()
    }

    #[test]
    fn the_file_is_made_once_for_everyone() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let first = map_table(&path(&folder)).unwrap();
        let second = map_table(&path(&folder)).unwrap();
        first.slots[3].held[2].set(77);
        assert_eq!(second.slots[3].held[2].get(), 77);
        let metadata = std::fs::metadata(folder.path().join("table")).unwrap();
        assert_eq!((metadata.len(), metadata.permissions().mode() & 0o777), (LENGTH as u64, 0o666));
    }

    #[test]
    fn another_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("table"), "something else, and longer than eight bytes").unwrap();
        assert!(map_table(&path(&folder)).is_none());
        std::fs::remove_file(folder.path().join("table")).unwrap();
        std::os::unix::fs::symlink("/dev/null", folder.path().join("table")).unwrap();
        assert!(map_table(&path(&folder)).is_none(), "by a link");
        assert!(map_table(c"/nothing/table").is_none());
    }

    #[test]
    fn memory_is_wiped_in_a_child() {
        assert_eq!(size_of::<Own>().max(OWN_BYTES), OWN_BYTES);
        assert!(sys::map_wiped_on_fork(4096).is_some());
    }
}
