//! What this process has allocated, by pointer or handle: a hash table with open addressing, in memory of its own, since
//! nothing here may call the program's malloc. It is used under [`Share::locked`] only.

use core::sync::atomic::Ordering;

use gpufence_limiter::{share::Share, sys};

/// What an entry's key is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A device pointer; `holder` is the context that it goes with.
    Pointer = 1,
    /// A device pointer of a pool, which counts it; `holder` is the pool.
    PoolPointer = 2,
    /// A memory pool; `size` is what is counted for it.
    Pool = 3,
    /// Physical memory (cuMemCreate); `references` and `holder`, the number of its mappings, keep it.
    Physical = 4,
    /// The address of a mapping; `holder` is the physical memory's handle.
    Mapping = 5,
    /// An array or mipmapped array; `holder` is the context that it goes with.
    Array = 6,
    /// A context; `size` is what the driver took for it.
    Context = 7,
    /// What a context's limits reserve, by context and limit.
    ContextLimit = 8,
    /// What the graphs on a GPU reserve, by device.
    Graphs = 9,
}

/// One thing.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Entry {
    /// Pointer or handle.
    pub key: u64,
    /// Bytes counted.
    pub size: u64,
    /// What it goes with.
    pub holder: u64,
    /// How often it is held.
    pub references: u32,
    /// Which of the limits' GPUs.
    pub gpu: u16,
    /// [`Kind`], 0 for a free place, [`REMOVED`] for one that was taken.
    kind: u8,
}

const REMOVED: u8 = 255;
const FIRST_CAPACITY: usize = 4096;

impl Entry {
    /// An entry that is held once.
    pub fn new(kind: Kind, key: u64, gpu: usize, size: u64, holder: u64) -> Self {
        Self { key, size, holder, references: 1, gpu: u16::try_from(gpu).unwrap_or(0), kind: kind as u8 }
    }

    /// Whether it is of a kind.
    pub fn is_a(&self, kind: Kind) -> bool {
        self.kind == kind as u8
    }

    /// Whether its place is taken.
    fn is_there(&self) -> bool {
        self.kind != 0 && self.kind != REMOVED
    }
}

#[repr(C)]
struct Header {
    capacity: usize,
    /// Places that aren't free: taken or removed.
    used: usize,
}

const HEADER: usize = 64;

/// The book of this process.
#[derive(Debug)]
pub struct Book {
    header: *mut Header,
}

impl Book {
    /// Works on the book, made if there is none. `None`: no memory for one.
    pub fn with<T>(share: &Share, work: impl FnOnce(&mut Self) -> T) -> Option<T> {
        share.locked(|| {
            let mut header = share.own.book.load(Ordering::Acquire).cast::<Header>();
            if header.is_null() {
                header = allocate(FIRST_CAPACITY)?;
            }
            let mut book = Self { header };
            let result = work(&mut book);
            share.own.book.store(book.header.cast(), Ordering::Release);
            Some(result)
        })
    }

    fn places(&mut self) -> &mut [Entry] {
        // SAFETY: the header is followed by that many places, all zeros or entries; the lock makes us the only user.
        unsafe {
            let first = self.header.byte_add(HEADER).cast::<Entry>();
            core::slice::from_raw_parts_mut(first, (*self.header).capacity)
        }
    }

    fn start(&mut self, key: u64) -> usize {
        let mixed = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        usize::try_from(mixed >> 32).unwrap_or(0) & (self.places().len() - 1)
    }

    fn position(&mut self, kind: u8, key: u64) -> Option<usize> {
        let mut position = self.start(key);
        let places = self.places();
        loop {
            let entry = &places[position];
            if entry.kind == 0 {
                return None;
            }
            if entry.kind == kind && entry.key == key {
                return Some(position);
            }
            position = (position + 1) & (places.len() - 1);
        }
    }

    /// An entry.
    pub fn find(&mut self, kind: Kind, key: u64) -> Option<&mut Entry> {
        let position = self.position(kind as u8, key)?;
        Some(&mut self.places()[position])
    }

    /// Takes an entry out.
    pub fn remove(&mut self, kind: Kind, key: u64) -> Option<Entry> {
        let position = self.position(kind as u8, key)?;
        Some(self.take(position))
    }

    fn take(&mut self, position: usize) -> Entry {
        let places = self.places();
        let entry = places[position];
        let next = (position + 1) & (places.len() - 1);
        // What ends a chain needs no mark.
        if places[next].kind == 0 {
            places[position].kind = 0;
            // SAFETY: ours, under the lock.
            unsafe { (*self.header).used -= 1 };
        } else {
            places[position].kind = REMOVED;
        }
        entry
    }

    /// Takes out every entry that `wanted` says, and gives it to `each`.
    pub fn remove_where(&mut self, wanted: impl Fn(&Entry) -> bool, mut each: impl FnMut(Entry)) {
        for position in 0..self.places().len() {
            let entry = self.places()[position];
            if entry.is_there() && wanted(&entry) {
                each(self.take(position));
            }
        }
    }

    /// Takes out an entry of a kind with a key in a range.
    pub fn remove_in(&mut self, kind: Kind, range: &core::ops::Range<u64>) -> Option<Entry> {
        let position = self.places().iter().position(|entry| entry.is_a(kind) && range.contains(&entry.key))?;
        Some(self.take(position))
    }

    /// Does something with every entry, which keeps its key.
    pub fn each(&mut self, work: impl FnMut(&mut Entry)) {
        self.places().iter_mut().filter(|entry| entry.is_there()).for_each(work);
    }

    /// Makes the pointers of a pool pointers that go with nothing.
    pub fn orphan(&mut self, pool: u64) {
        self.each(|entry| {
            if entry.is_a(Kind::PoolPointer) && entry.holder == pool {
                entry.kind = Kind::Pointer as u8;
                entry.holder = 0;
            }
        });
    }

    /// The keys of a kind's entries on a GPU, at most as many as fit.
    pub fn keys(&mut self, kind: Kind, gpu: usize, keys: &mut [u64]) -> usize {
        let mut count = 0;
        for entry in self.places() {
            if entry.is_a(kind) && usize::from(entry.gpu) == gpu && count < keys.len() {
                keys[count] = entry.key;
                count += 1;
            }
        }
        count
    }

    /// Puts an entry in, or adds its size to the one of its kind and key.
    pub fn add(&mut self, entry: Entry) {
        match self.position(entry.kind, entry.key) {
            Some(position) => self.places()[position].size += entry.size,
            None => {
                self.insert(entry);
            }
        }
    }

    /// Makes an entry smaller, as far as it goes. Gives by how much.
    pub fn lower(&mut self, kind: Kind, key: u64, less: impl FnOnce(u64) -> u64) -> Option<u64> {
        let entry = self.find(kind, key)?;
        let less = less(entry.size).min(entry.size);
        entry.size -= less;
        Some(less)
    }

    /// Puts an entry in, in the place of one of its kind and key. `false`: no memory; nothing is put in then.
    pub fn insert(&mut self, entry: Entry) -> bool {
        // SAFETY: ours, under the lock.
        let (capacity, used) = unsafe { ((*self.header).capacity, (*self.header).used) };
        if used * 4 >= capacity * 3 && !self.grow() && used + 1 >= capacity {
            return false;
        }
        self.put(entry);
        true
    }

    fn put(&mut self, entry: Entry) {
        let mut position = self.start(entry.key);
        let places = self.places();
        let mut free = None;
        loop {
            let here = &places[position];
            if here.kind == 0 {
                break;
            }
            if here.kind == entry.kind && here.key == entry.key {
                places[position] = entry;
                return;
            }
            if here.kind == REMOVED && free.is_none() {
                free = Some(position);
            }
            position = (position + 1) & (places.len() - 1);
        }
        places[free.unwrap_or(position)] = entry;
        if free.is_none() {
            // SAFETY: ours, under the lock.
            unsafe { (*self.header).used += 1 };
        }
    }

    /// Moves to a book with room: twice as large, or as large where most places were only marked.
    fn grow(&mut self) -> bool {
        let live = self.places().iter().filter(|entry| entry.is_there()).count();
        let old = self.places().len();
        let length = HEADER + size_of_val(self.places());
        let Some(header) = allocate(if live * 2 >= old { old * 2 } else { old }) else { return false };
        let mut new = Self { header };
        for entry in self.places() {
            if entry.is_there() {
                new.put(*entry);
            }
        }
        sys::unmap(self.header.cast(), length);
        self.header = new.header;
        true
    }
}

fn allocate(capacity: usize) -> Option<*mut Header> {
    let header = sys::map_private(HEADER + capacity * size_of::<Entry>())?.cast::<Header>();
    // SAFETY: page-aligned memory of zeros, long enough; zeros are free places.
    unsafe { (*header).capacity = capacity };
    Some(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn book() -> Book {
        Book { header: allocate(16).unwrap() }
    }

    #[test]
    fn as_a_map_does() {
        use std::collections::HashMap;
        let mut book = book();
        let mut model: HashMap<u64, u64> = HashMap::new();
        let mut random = 1_u64;
        for step in 0..200_000_u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let key = (random >> 33) % 5000 * 512;
            if random >> 20 & 1 == 0 {
                assert!(book.insert(Entry::new(Kind::Pointer, key, 0, step, 7)));
                model.insert(key, step);
            } else {
                assert_eq!(book.remove(Kind::Pointer, key).map(|entry| entry.size), model.remove(&key));
            }
        }
        for (key, size) in &model {
            assert_eq!(book.find(Kind::Pointer, *key).map(|entry| entry.size), Some(*size));
        }
        let mut sum = 0;
        book.remove_where(|_| true, |entry| sum += entry.size);
        assert_eq!(sum, model.values().sum::<u64>());
        assert!(model.keys().all(|key| book.find(Kind::Pointer, *key).is_none()));
    }

    #[test]
    fn one_key_of_two_kinds() {
        let mut book = book();
        book.insert(Entry::new(Kind::Pointer, 5, 0, 1, 0));
        book.insert(Entry::new(Kind::Array, 5, 0, 2, 0));
        assert_eq!(book.remove(Kind::Array, 5).unwrap().size, 2);
        assert_eq!(book.remove(Kind::Array, 5).map(|entry| entry.size), None);
        assert_eq!(book.find(Kind::Pointer, 5).unwrap().size, 1);
        let mut keys = [0; 4];
        assert_eq!((book.keys(Kind::Pointer, 0, &mut keys), keys[0]), (1, 5));
    }

    #[test]
    fn allocating_and_freeing_for_ever_fills_nothing() {
        let mut book = book();
        for key in 0..1_000_000 {
            book.insert(Entry::new(Kind::Pointer, key, 0, 1, 0));
            book.remove(Kind::Pointer, key);
        }
        assert!(book.places().len() <= 16);
    }
}
