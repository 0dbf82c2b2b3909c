//! Stream-ordered memory. A pool takes memory from the device in large pieces and keeps some when it is freed, so what
//! counts is what the pool has taken.

use gpufence_limiter::share::{State, state};

use crate::{
    account::{self, Gpu, Meets, current, on_device},
    book::{Book, Entry, Kind},
    driver, graphs,
    result::{CuResult, OUT_OF_MEMORY, SUCCESS},
};

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: i32 = 1;
/// As many pools of a GPU are looked through for memory that they don't need.
const MOST_POOLS: usize = 64;

/// Where memory is to be: the beginning of CUmemPoolProps and of CUmemAllocationProp.
#[repr(C)]
#[derive(Debug)]
pub struct Properties {
    allocation_kind: i32,
    handle_kinds: i32,
    location_kind: i32,
    location: i32,
}

impl Properties {
    /// What memory of such properties meets: on the host it isn't the GPU's.
    pub fn meets(&self) -> Meets {
        if self.location_kind == ON_DEVICE { on_device(self.location) } else { Meets::Nothing }
    }
}

gpufence_limiter::entry_points! { crate::result::DRIVER, crate::result::NOT_FOUND;
    /// From the current pool of the current device.
    fn cuMemAllocAsync(pointer: *mut u64, size: usize, stream: usize) |real| {
        on_stream(size as u64, stream, || real(pointer, size, stream), || *pointer)
    }

    /// The same, on the thread's own default stream.
    fn cuMemAllocAsync_ptsz(pointer: *mut u64, size: usize, stream: usize) |real| {
        on_stream(size as u64, driver::per_thread(stream), || real(pointer, size, stream), || *pointer)
    }

    /// From a pool.
    fn cuMemAllocFromPoolAsync(pointer: *mut u64, size: usize, pool: usize, stream: usize) |real| {
        device_of(pool).run(
            || real(pointer, size, pool, stream),
            |gpu, make| from_pool(gpu, pool, size as u64, stream, make, || *pointer),
        )
    }

    /// The same, on the thread's own default stream.
    fn cuMemAllocFromPoolAsync_ptsz(pointer: *mut u64, size: usize, pool: usize, stream: usize) |real| {
        device_of(pool).run(
            || real(pointer, size, pool, stream),
            |gpu, make| from_pool(gpu, pool, size as u64, driver::per_thread(stream), make, || *pointer),
        )
    }

    /// A pool of one's own.
    fn cuMemPoolCreate(pool: *mut usize, properties: *const Properties) |real| {
        let answer = real(pool, properties);
        if answer == SUCCESS && let Meets::Limit(gpu) = (*properties).meets() {
            gpu.book(|book| book.insert(Entry::new(Kind::Pool, *pool as u64, gpu.number, 0, 0)));
        }
        answer
    }

    /// What it holds goes back to the device: at once, or with the last of its memory that is in use.
    fn cuMemPoolDestroy(pool: usize) |real| {
        let State::Limited(share) = state() else { return real(pool) };
        let in_use = driver::pool_memory(pool).map_or(0, |(_, used)| used);
        let take = |book: &mut Book| book.remove(Kind::Pool, pool as u64);
        account::taken_out(share, take, || real(pool), |entry| {
            // What is still in use is counted by its pointers from here on.
            Gpu::of_entry(share, &entry).give_back(entry.size.saturating_sub(in_use));
            Book::with(share, |book| book.orphan(pool as u64));
        })
    }

    /// Gives back what isn't in use.
    fn cuMemPoolTrimTo(pool: usize, keep: usize) |real| {
        let answer = real(pool, keep);
        if let Meets::Limit(gpu) = device_of(pool) {
            settle(gpu, pool as u64);
        }
        answer
    }
}

/// Which GPU a pool is on. A pool that isn't known is a device's default pool, or another process's: that one can't be
/// allocated from.
fn device_of(pool: usize) -> Meets {
    let State::Limited(share) = state() else { return current() };
    if let Some(Some(number)) = Book::with(share, |book| book.find(Kind::Pool, pool as u64).map(|entry| entry.gpu)) {
        return Meets::Limit(Gpu { share, number: usize::from(number) });
    }
    let mut count = 0;
    // SAFETY: it writes one number.
    if unsafe { driver::device_get_count(&raw mut count) } != SUCCESS {
        return Meets::Refusal;
    }
    for ordinal in 0..count {
        let (mut device, mut default) = (0, 0);
        // SAFETY: each writes one number or handle.
        let found = unsafe {
            driver::device_get(&raw mut device, ordinal) == SUCCESS
                && driver::device_default_pool(&raw mut default, device) == SUCCESS
                && default == pool
        };
        if found {
            return on_device(device);
        }
    }
    Meets::Nothing
}

fn on_stream(size: u64, stream: usize, make: impl FnOnce() -> CuResult, key: impl FnOnce() -> u64) -> CuResult {
    current().run(make, |gpu, make| {
        let (mut device, mut pool) = (0, 0);
        // SAFETY: each writes one number or handle.
        let found = unsafe {
            driver::ctx_get_device(&raw mut device) == SUCCESS && driver::device_pool(&raw mut pool, device) == SUCCESS
        };
        if found { from_pool(gpu, pool, size, stream, make, key) } else { OUT_OF_MEMORY }
    })
}

fn from_pool(
    gpu: Gpu,
    pool: usize,
    size: u64,
    stream: usize,
    make: impl FnOnce() -> CuResult,
    key: impl FnOnce() -> u64,
) -> CuResult {
    if driver::is_capturing(stream) {
        return graphs::add(gpu, size, make);
    }
    // What the pool has free it needn't take. Whether that is enough is seen afterwards, when nothing is promised yet.
    let free = || driver::pool_memory(pool).map_or(0, |(reserved, used)| reserved.saturating_sub(used));
    let mut need = size.saturating_sub(free());
    if !gpu.reserve(need) {
        need = size.saturating_sub(free());
        if !gpu.reserve(need) {
            return gpu.deny();
        }
    }
    count(gpu, pool as u64, need);
    let answer = make();
    if answer != SUCCESS {
        settle(gpu, pool as u64);
        return answer;
    }
    let pointer = key();
    if settle(gpu, pool as u64) {
        gpu.book(|book| book.insert(Entry::new(Kind::PoolPointer, pointer, gpu.number, size, pool as u64)));
        return SUCCESS;
    }
    // The pool took more than there is room for: the pieces it takes are larger than what is asked for.
    // SAFETY: the pointer was just made on this stream.
    unsafe {
        driver::mem_free_async(pointer, stream);
        driver::stream_synchronize(stream);
        driver::pool_trim(pool, 0);
    }
    settle(gpu, pool as u64);
    gpu.deny()
}

/// Adds to what is counted for a pool.
fn count(gpu: Gpu, pool: u64, size: u64) {
    gpu.book(|book| book.add(Entry::new(Kind::Pool, pool, gpu.number, size, 0)));
}

/// Makes what is counted for a pool what it has taken. `false`: it has taken more than there is room for.
pub fn settle(gpu: Gpu, pool: u64) -> bool {
    let Ok(handle) = usize::try_from(pool) else { return true };
    let Some((reserved, _)) = driver::pool_memory(handle) else { return true };
    let difference = gpu.book(|book| {
        let entry = book.find(Kind::Pool, pool)?;
        let less = entry.size.saturating_sub(reserved);
        let more = reserved.saturating_sub(entry.size);
        entry.size -= less;
        Some((less, more))
    });
    let Some(Some((less, more))) = difference else { return true };
    if less > 0 {
        gpu.give_back(less);
    }
    if more > 0 {
        if !gpu.share.reserve(gpu.number, more) {
            return false;
        }
        count(gpu, pool, more);
    }
    true
}

/// Makes what is counted for the pools of a GPU what they have taken by now.
pub fn settle_all(gpu: Gpu) {
    let (pools, count) = all_of(gpu);
    pools[..count].iter().for_each(|pool| {
        settle(gpu, *pool);
    });
}

fn all_of(gpu: Gpu) -> ([u64; MOST_POOLS], usize) {
    let mut pools = [0; MOST_POOLS];
    let count = gpu.book(|book| book.keys(Kind::Pool, gpu.number, &mut pools)).unwrap_or(0);
    (pools, count)
}

/// Has the pools of a GPU give back what they don't use. Whether there were any.
pub fn give_back_unused(gpu: Gpu) -> bool {
    let (pools, count) = all_of(gpu);
    for pool in &pools[..count] {
        // SAFETY: a pool that this process has used; a handle that has gone is refused.
        unsafe { driver::pool_trim(usize::try_from(*pool).unwrap_or(0), 0) };
        settle(gpu, *pool);
    }
    count > 0
}
