//! The usage table: who in a container holds how much of which GPU.
//!
//! It lies in a file of fixed layout that all processes of a container map. There is no lock to be left held, and no sum
//! to go wrong: what is used is what stands in the slots, and each process writes only its own.
//!
//! **To reserve**, a process adds to its own slot first and then sums up all slots. Where the sum passes the limit, it
//! takes its own back and the reservation has failed. Of all reservations that are granted at one time, the one that
//! added last has seen all others, so their sum never passes the limit. Two that meet may both see too much; each then
//! steps back and tries again, at a distance that differs.
//!
//! **A process that ends** in whatever way leaves its slot with an owner that isn't alive. Who finds too little room, or
//! asks what is used, empties such slots. A slot names its owner by PID and start time, as its own /proc shows them; one
//! whose /proc is another's can't be judged from here and is left alone, which errs on the safe side.
//!
//! The file is the container's, so what stands in it may be anything: no index, length or loop depends on it.

use core::{
    hint,
    sync::atomic::{AtomicU64, Ordering::SeqCst},
};

use crate::limits::MAX_GPUS;

/// How many processes of one container can use GPUs at a time.
pub const SLOTS: usize = 1024;
/// The file's first eight bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"gpufuse1");
/// How often a reservation that meets others is tried before it counts as failed.
const TRIES: u32 = 64;
/// In an owner's word: the slot is being emptied by that process.
const EMPTYING: u64 = 1 << 63;

/// A number that processes share. The table's own is [`AtomicU64`]; the model checker brings another.
pub trait Word {
    /// Reads.
    fn get(&self) -> u64;
    /// Writes.
    fn set(&self, value: u64);
    /// Adds, and gives what was there before.
    fn add(&self, value: u64) -> u64;
    /// Writes `new` if `old` is there.
    fn swap_if(&self, old: u64, new: u64) -> bool;

    /// Orders what was added before against what is read after. Sequentially consistent operations need nothing more; the
    /// model checker takes them for weaker than they are.
    fn settle(&self) {}

    /// Takes away, and stops at zero: noise in the file must not wrap.
    fn take(&self, value: u64) {
        loop {
            let now = self.get();
            if self.swap_if(now, now.saturating_sub(value)) {
                return;
            }
        }
    }

    /// Makes it at least `value`.
    fn raise(&self, value: u64) {
        loop {
            let now = self.get();
            if now >= value || self.swap_if(now, value) {
                return;
            }
        }
    }
}

/// The same for each kind of atomic, and what one kind has besides.
macro_rules! word {
    ($atomic:ty { $($besides:item)* }) => {
        impl Word for $atomic {
            fn get(&self) -> u64 {
                self.load(SeqCst)
            }

            fn set(&self, value: u64) {
                self.store(value, SeqCst);
            }

            fn add(&self, value: u64) -> u64 {
                self.fetch_add(value, SeqCst)
            }

            fn swap_if(&self, old: u64, new: u64) -> bool {
                self.compare_exchange(old, new, SeqCst, SeqCst).is_ok()
            }

            $($besides)*
        }
    };
}

word!(AtomicU64 {});

/// What is known of one GPU beside the slots.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Gpu<W> {
    /// Allocations that were denied.
    pub denied: W,
    /// Nanoseconds for which kernel launches were held back.
    pub throttled: W,
    /// `CLOCK_MONOTONIC` before which nothing is launched.
    pub resume: W,
    /// What a context takes, by two measurements that agree; 0: none do.
    pub context: W,
    /// The last measurement.
    pub measured: W,
}

/// One process.
#[repr(C)]
#[derive(Debug)]
pub struct Slot<W, const GPUS: usize> {
    /// PID and start time in one word; 0: free.
    pub owner: W,
    /// Which /proc these are of, by its device number and one; 0: not yet said.
    pub view: W,
    /// Bytes held of each GPU.
    pub held: [W; GPUS],
}

/// The file.
#[repr(C)]
#[derive(Debug)]
pub struct Table<W, const GPUS: usize, const COUNT: usize> {
    /// [`MAGIC`].
    pub magic: W,
    /// One more than the last slot that was ever used.
    pub top: W,
    /// For each GPU.
    pub gpus: [Gpu<W>; GPUS],
    /// For each process.
    pub slots: [Slot<W, GPUS>; COUNT],
}

/// The table as it lies in the file.
pub type UsageTable = Table<AtomicU64, MAX_GPUS, SLOTS>;

/// The file's length in bytes.
pub const LENGTH: usize = size_of::<UsageTable>();

/// A process's name in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// As /proc shows it.
    pub pid: u32,
    /// Field 22 of its `stat`, in clock ticks since the machine started.
    pub start: u64,
    /// The device number of that /proc.
    pub view: u64,
}

impl Owner {
    /// PID and start time in one word. A PID has at most 22 bits (PID_MAX_LIMIT).
    pub fn word(&self) -> u64 {
        (u64::from(self.pid) | self.start << 22) & !EMPTYING
    }

    fn view_word(&self) -> u64 {
        self.view.wrapping_add(1).max(1)
    }
}

/// PID and the low 41 bits of the start time, of an owner's word.
pub fn parts(word: u64) -> (u32, u64) {
    let word = word & !EMPTYING;
    (u32::try_from(word & 0x3f_ffff).unwrap_or(0), word >> 22)
}

impl<W: Word, const GPUS: usize, const COUNT: usize> Table<W, GPUS, COUNT> {
    /// The slots that were ever used.
    pub fn used_slots(&self) -> &[Slot<W, GPUS>] {
        let top = usize::try_from(self.top.get()).unwrap_or(COUNT).min(COUNT);
        &self.slots[..top]
    }

    /// Bytes held of a GPU by all processes.
    pub fn held(&self, gpu: usize) -> u64 {
        self.used_slots().iter().fold(0, |sum: u64, slot| sum.saturating_add(slot.held[gpu].get()))
    }

    /// A slot for a process: the one that it had before an exec, else a free one. `None`: all are taken.
    ///
    /// Two threads of one process must not call it at a time.
    pub fn claim(&self, owner: &Owner, alive: &impl Fn(u32, u64) -> bool) -> Option<usize> {
        let word = owner.word();
        let own = |slot: &Slot<W, GPUS>| slot.owner.get() == word && slot.view.get() == owner.view_word();
        if let Some(number) = self.used_slots().iter().position(own) {
            // What stands in it went with the program that was there before exec.
            self.slots[number].held.iter().for_each(|held| held.set(0));
            return Some(number);
        }
        self.claim_free(owner).or_else(|| {
            self.empty_dead(owner, alive);
            self.claim_free(owner)
        })
    }

    fn claim_free(&self, owner: &Owner) -> Option<usize> {
        let number = self.slots.iter().position(|slot| slot.owner.get() == 0 && slot.owner.swap_if(0, owner.word()))?;
        self.slots[number].view.set(owner.view_word());
        // Before anything is added: who sums up must come this far.
        self.top.raise(number as u64 + 1);
        Some(number)
    }

    /// Empties the slots whose owners are dead as far as `asking` can tell. Gives how many.
    ///
    /// `alive` says whether its /proc has a process of this PID and start time (the low 41 bits).
    pub fn empty_dead(&self, asking: &Owner, alive: &impl Fn(u32, u64) -> bool) -> usize {
        let mut emptied = 0;
        for slot in self.used_slots() {
            let word = slot.owner.get();
            let (pid, start) = parts(word);
            if word == 0 || slot.view.get() != asking.view_word() || alive(pid, start) {
                continue;
            }
            // Ours to empty from here on; should we die over it, the next one finds us dead and goes on.
            let emptying = asking.word() | EMPTYING;
            if !slot.owner.swap_if(word, emptying) {
                continue;
            }
            slot.held.iter().for_each(|held| held.set(0));
            slot.view.set(0);
            slot.owner.swap_if(emptying, 0);
            emptied += 1;
        }
        emptied
    }

    /// Reserves `size` bytes of a GPU for the process of `slot`, so that all together hold at most `limit`.
    pub fn reserve(&self, slot: usize, gpu: usize, size: u64, limit: u64) -> bool {
        let own = &self.slots[slot].held[gpu];
        if self.try_once(own, gpu, size, limit) {
            return true;
        }
        for attempt in 0..TRIES {
            // Others that step back leave room again; a longer wait each time, and another for each slot.
            let wait = (((slot as u64 + 1) * 2_654_435_761) >> 5) & ((1 << (attempt / 4).min(10)) - 1);
            (0..wait).for_each(|_| hint::spin_loop());
            let sum = self.held(gpu);
            if sum.checked_add(size).is_some_and(|sum| sum <= limit) && self.try_once(own, gpu, size, limit) {
                return true;
            }
        }
        false
    }

    /// One try: added first, then looked at.
    pub fn try_once(&self, own: &W, gpu: usize, size: u64, limit: u64) -> bool {
        // More than there can be is no number to add.
        if size > limit {
            return false;
        }
        own.add(size);
        own.settle();
        if self.held(gpu) <= limit {
            return true;
        }
        own.take(size);
        false
    }

    /// Gives back what was reserved.
    pub fn give_back(&self, slot: usize, gpu: usize, size: u64) {
        self.slots[slot].held[gpu].take(size);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    type Small<W> = Table<W, 1, 2>;

    word!(loom::sync::atomic::AtomicU64 {
        fn settle(&self) {
            loom::sync::atomic::fence(SeqCst);
        }
    });

    /// Every interleaving with up to three switches that nothing forces; without the bound it takes minutes.
    fn check(model: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(model);
    }

    fn small<W: Word, const COUNT: usize>(word: impl Fn(u64) -> W) -> Table<W, 1, COUNT> {
        let gpu = || Gpu { denied: word(0), throttled: word(0), resume: word(0), context: word(0), measured: word(0) };
        Table {
            magic: word(MAGIC),
            top: word(0),
            gpus: std::array::from_fn(|_| gpu()),
            slots: std::array::from_fn(|_| Slot { owner: word(0), view: word(0), held: [word(0)] }),
        }
    }

    fn owner(pid: u32) -> Owner {
        Owner { pid, start: 1, view: 7 }
    }

    fn everyone(_: u32, _: u64) -> bool {
        true
    }

    #[test]
    fn two_processes_never_pass_the_limit() {
        check(|| {
            use loom::sync::atomic::AtomicU64 as Shared;
            let table: Arc<Small<Shared>> = Arc::new(small(Shared::new));
            let slots = [1, 2].map(|pid| table.claim(&owner(pid), &everyone).unwrap());
            // What was granted and not yet given back; counted up after the grant and down before the giving back.
            let granted = Arc::new(Shared::new(0));
            let run = |slot: usize| {
                let (table, granted) = (table.clone(), granted.clone());
                move || {
                    let own = &table.slots[slot].held[0];
                    for size in [6, 5] {
                        if table.try_once(own, 0, size, 10) {
                            assert!(granted.add(size) + size <= 10, "granted more than the limit");
                            granted.take(size);
                            table.give_back(slot, 0, size);
                        }
                    }
                }
            };
            let first = loom::thread::spawn(run(slots[0]));
            run(slots[1])();
            first.join().unwrap();
            assert_eq!(table.held(0), 0, "everything came back");
        });
    }

    #[test]
    fn a_slot_is_emptied_once_and_never_a_live_one() {
        check(|| {
            use loom::sync::atomic::AtomicU64 as Shared;
            let table: Arc<Small<Shared>> = Arc::new(small(Shared::new));
            let dead = table.claim(&owner(1), &everyone).unwrap();
            assert!(table.try_once(&table.slots[dead].held[0], 0, 10, 10));
            let alive = |pid: u32, _: u64| pid != 1;
            let run = |pid: u32| {
                let table = table.clone();
                move || {
                    table.empty_dead(&owner(pid), &alive);
                    let slot = table.claim(&owner(pid), &alive).unwrap();
                    table.try_once(&table.slots[slot].held[0], 0, 4, 10)
                }
            };
            let first = loom::thread::spawn(run(2));
            let second = run(3)();
            let first = first.join().unwrap();
            let expected = 4 * (u64::from(first) + u64::from(second));
            assert!(table.held(0) == expected || table.held(0) == expected + 10, "{}", table.held(0));
            table.empty_dead(&owner(3), &alive);
            assert_eq!(table.held(0), expected);
        });
    }

    #[test]
    fn to_the_byte() {
        let table: Table<AtomicU64, 1, 4> = small(AtomicU64::new);
        let slot = table.claim(&owner(1), &everyone).unwrap();
        let other = table.claim(&owner(2), &everyone).unwrap();
        assert!(table.reserve(slot, 0, 60, 100));
        assert!(!table.reserve(other, 0, 41, 100));
        assert!(table.reserve(other, 0, 40, 100));
        assert!(!table.reserve(slot, 0, 1, 100));
        assert!(table.reserve(slot, 0, 0, 100), "nothing always fits");
        assert!(!table.reserve(slot, 0, u64::MAX, 100));
        table.give_back(slot, 0, 61);
        assert_eq!(table.held(0), 40, "no wrap below zero");
    }

    #[test]
    fn the_dead_are_found_and_others_left_alone() {
        let table: Table<AtomicU64, 1, 4> = small(AtomicU64::new);
        for pid in 1..=4 {
            let slot = table.claim(&Owner { view: u64::from(pid == 4), ..owner(pid) }, &everyone).unwrap();
            assert!(table.reserve(slot, 0, 10, 100));
        }
        // 3 asks; 1 is dead, 2 is another process by now, 4 is in another /proc.
        let alive = |pid: u32, start: u64| pid == 3 && start == 1;
        let asking = Owner { view: 0, ..owner(3) };
        assert_eq!(table.empty_dead(&asking, &alive), 2, "all whose /proc is the same and who aren't there");
        assert_eq!(table.held(0), 20);
        let full = (5..=7).map(|pid| table.claim(&owner(pid), &everyone));
        assert_eq!(full.flatten().count(), 2);
        assert_eq!(table.claim(&owner(8), &everyone), None, "a full table");
    }

    #[test]
    fn exec_starts_from_nothing_in_the_same_slot() {
        let table: Table<AtomicU64, 1, 4> = small(AtomicU64::new);
        let slot = table.claim(&owner(9), &everyone).unwrap();
        assert!(table.reserve(slot, 0, 10, 100));
        assert_eq!(table.claim(&owner(9), &everyone), Some(slot));
        assert_eq!(table.held(0), 0);
    }

    #[test]
    fn one_that_died_while_emptying_is_no_obstacle() {
        let table: Table<AtomicU64, 1, 4> = small(AtomicU64::new);
        let slot = table.claim(&owner(1), &everyone).unwrap();
        assert!(table.reserve(slot, 0, 10, 100));
        table.slots[slot].owner.set(owner(2).word() | EMPTYING);
        assert_eq!(table.empty_dead(&owner(3), &|pid, _| pid == 3), 1);
        assert_eq!(table.held(0), 0);
        assert_eq!(table.slots[slot].owner.get(), 0);
    }

    #[test]
    fn noise_hurts_nobody_else() {
        let table: Table<AtomicU64, 1, 4> = small(AtomicU64::new);
        table.top.set(u64::MAX);
        for slot in &table.slots {
            slot.held[0].set(u64::MAX);
            slot.owner.set(u64::MAX);
        }
        assert_eq!(table.held(0), u64::MAX);
        assert!(!table.reserve(0, 0, 1, 100));
        assert_eq!(table.claim(&owner(1), &everyone), None);
    }
}
