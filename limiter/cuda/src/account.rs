//! What an allocation meets: reserved before it is made, given back after.

use core::sync::atomic::Ordering;

use gpufence_limiter::{
    limits::Limit,
    share::{Share, State, state},
    text,
};

use crate::{
    book::{Book, Entry, Kind},
    contexts, driver, pools,
    result::{CuResult, DEINITIALIZED, INVALID_CONTEXT, NOT_FOUND, NOT_INITIALIZED, OUT_OF_MEMORY, SUCCESS},
};

/// What an allocation meets.
#[derive(Debug, Clone, Copy)]
pub enum Meets {
    /// No limit.
    Nothing,
    /// A refusal: the limiter fails, or the device is none of the grant's.
    Refusal,
    /// A limit.
    Limit(Gpu),
}

/// One of the container's GPUs.
#[derive(Debug, Clone, Copy)]
pub struct Gpu {
    /// Limits and usage.
    pub share: &'static Share,
    /// Which of the limits.
    pub number: usize,
}

/// In [`gpufence_limiter::share::Own::devices`]: none of the grant's.
const NOT_GRANTED: u8 = u8::MAX;

/// What an allocation on the current context's device meets.
pub fn current() -> Meets {
    meets(|share| {
        let mut device = 0;
        // SAFETY: it writes one number.
        match unsafe { driver::ctx_get_device(&raw mut device) } {
            SUCCESS => of(share, device),
            // With no context the real one fails as well, and says why.
            INVALID_CONTEXT | NOT_INITIALIZED | DEINITIALIZED => Meets::Nothing,
            _ => Meets::Refusal,
        }
    })
}

/// What an allocation on a device meets.
pub fn on_device(device: i32) -> Meets {
    meets(|share| of(share, device))
}

fn meets(limited: impl FnOnce(&'static Share) -> Meets) -> Meets {
    match state() {
        State::Transparent | State::Failed { allow: true } => Meets::Nothing,
        State::Failed { allow: false } => Meets::Refusal,
        State::Limited(share) => limited(share),
    }
}

impl Meets {
    /// Makes an allocation: as it is asked for, not at all, or as `limited` says.
    pub fn run<Make: FnOnce() -> CuResult>(self, make: Make, limited: impl FnOnce(Gpu, Make) -> CuResult) -> CuResult {
        match self {
            Self::Nothing => make(),
            Self::Refusal => OUT_OF_MEMORY,
            Self::Limit(gpu) => limited(gpu, make),
        }
    }
}

fn of(share: &'static Share, device: i32) -> Meets {
    let place = usize::try_from(device).ok().and_then(|device| share.own.devices.get(device));
    let known = place.map_or(0, |place| place.load(Ordering::Relaxed));
    let number = if known == 0 {
        let found = find(share, device).and_then(|number| u8::try_from(number + 1).ok()).unwrap_or(NOT_GRANTED);
        if let Some(place) = place {
            place.store(found, Ordering::Relaxed);
        }
        found
    } else {
        known
    };
    if number == NOT_GRANTED { Meets::Refusal } else { Meets::Limit(Gpu { share, number: usize::from(number) - 1 }) }
}

/// Which limit is a device's: by its UUID. Where the grant names its only GPU in another way, that one.
#[cold]
fn find(share: &Share, device: i32) -> Option<usize> {
    let mut bytes = [0; 16];
    // SAFETY: both write a UUID of 16 bytes; the second is of drivers before 11.4, which had no MIG's.
    let answer = unsafe {
        match driver::device_get_uuid_v2(&raw mut bytes, device) {
            NOT_FOUND => driver::device_get_uuid(&raw mut bytes, device),
            answer => answer,
        }
    };
    if answer != SUCCESS {
        return None;
    }
    let by_uuid =
        [&b"GPU-"[..], b"MIG-"].iter().find_map(|start| share.limits.find(text::uuid(&bytes, start).as_bytes()));
    by_uuid.or_else(|| {
        let only = share.limits.gpus().len() == 1;
        let names_a_uuid = share.limits.gpus().first()?.name().get(4..).is_some_and(|rest| rest.len() == 36);
        (only && !names_a_uuid).then_some(0)
    })
}

impl Gpu {
    /// Reserves; what pools hold without need, and what was measured too much, is given back first where it would help.
    pub fn reserve(self, size: u64) -> bool {
        self.share.reserve(self.number, size)
            || (contexts::correct(self) && self.share.reserve(self.number, size))
            || (pools::give_back_unused(self) && self.share.reserve(self.number, size))
    }

    /// Gives back.
    pub fn give_back(self, size: u64) {
        self.share.give_back(self.number, size);
    }

    /// An allocation was denied.
    pub fn deny(self) -> CuResult {
        self.share.denied(self.number);
        OUT_OF_MEMORY
    }

    /// Makes an allocation of a known size: reserved before, given back where it fails.
    pub fn reserved(self, size: u64, make: impl FnOnce() -> CuResult) -> CuResult {
        if !self.reserve(size) {
            return self.deny();
        }
        let answer = make();
        if answer != SUCCESS {
            self.give_back(size);
        }
        answer
    }

    /// What the grant says of it.
    pub fn limit(self) -> &'static Limit {
        &self.share.limits.gpus()[self.number]
    }

    /// The GPU that an entry is on.
    pub fn of_entry(share: &'static Share, entry: &Entry) -> Self {
        Self { share, number: usize::from(entry.gpu) }
    }

    /// Works on the book.
    pub fn book<T>(self, work: impl FnOnce(&mut Book) -> T) -> Option<T> {
        Book::with(self.share, work)
    }
}

/// Makes an allocation of a known size, with `make`, and writes it into the book, by the key that `key` then reads.
pub fn allocate(
    meets: Meets,
    kind: Kind,
    size: u64,
    make: impl FnOnce() -> CuResult,
    key: impl FnOnce() -> u64,
) -> CuResult {
    meets.run(make, |gpu, make| {
        let answer = gpu.reserved(size, make);
        if answer == SUCCESS {
            let holder = if kind == Kind::Physical { 0 } else { driver::current_context() as u64 };
            // With no memory for the book it stays counted, and is given back with the process.
            gpu.book(|book| book.insert(Entry::new(kind, key(), gpu.number, size, holder)));
        }
        answer
    })
}

/// Frees, with `free`, what has this key, and gives back what was counted for it.
pub fn free(kinds: &[Kind], key: u64, free: impl FnOnce() -> CuResult) -> CuResult {
    let State::Limited(share) = state() else { return free() };
    let take = |book: &mut Book| kinds.iter().find_map(|kind| book.remove(*kind, key));
    taken_out(share, take, free, |entry| {
        let gpu = Gpu::of_entry(share, &entry);
        if entry.is_a(Kind::PoolPointer) {
            pools::settle(gpu, entry.holder);
        } else {
            gpu.give_back(entry.size);
        }
    })
}

/// Frees, with `free`, what `take` takes out of the book, and does `then` with it; puts it back where it isn't freed. It
/// leaves the book first: once freed, the same pointer or range may be another thread's.
pub fn taken_out(
    share: &Share,
    take: impl FnOnce(&mut Book) -> Option<Entry>,
    free: impl FnOnce() -> CuResult,
    then: impl FnOnce(Entry),
) -> CuResult {
    let entry = Book::with(share, take).flatten();
    let answer = free();
    match entry {
        Some(entry) if answer == SUCCESS => then(entry),
        Some(entry) => {
            Book::with(share, |book| book.insert(entry));
        }
        None => {}
    }
    answer
}
