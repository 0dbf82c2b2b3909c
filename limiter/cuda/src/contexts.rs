//! What the driver takes for a context, which no allocation asks for: some hundred megabytes, measured when it is made.

use gpufence_limiter::{
    log,
    share::{Share, State, state},
    table::Word,
    text::Text,
};

use crate::{
    account::{Gpu, Meets, current, on_device},
    book::{Book, Entry, Kind},
    driver,
    result::{CuResult, SUCCESS},
};

/// No context takes more; what a measurement says beyond it is a neighbour's doing, who allocated at the same time.
const MOST: u64 = 1 << 30;
/// No context takes less; a neighbour has freed at the same time.
const LEAST: u64 = 16 << 20;
/// How far two measurements that agree may differ.
const SLACK: u64 = 1 << 20;
/// `CU_LIMIT_PRINTF_FIFO_SIZE` and `CU_LIMIT_MALLOC_HEAP_SIZE`: limits whose whole size a context takes.
const SIZED_LIMITS: [i32; 2] = [1, 2];

gpufence_limiter::entry_points! { crate::result::DRIVER, crate::result::NOT_FOUND;
    /// A context.
    fn cuCtxCreate(context: *mut usize, flags: u32, device: i32) |real| {
        create(device, || real(context, flags, device), || *context)
    }

    /// A context.
    fn cuCtxCreate_v2(context: *mut usize, flags: u32, device: i32) |real| {
        create(device, || real(context, flags, device), || *context)
    }

    /// A context with execution affinity.
    fn cuCtxCreate_v3(
        context: *mut usize, affinity: *mut core::ffi::c_void, count: i32, flags: u32, device: i32,
    ) |real| {
        create(device, || real(context, affinity, count, flags, device), || *context)
    }

    /// A context with parameters.
    fn cuCtxCreate_v4(context: *mut usize, parameters: *mut core::ffi::c_void, flags: u32, device: i32) |real| {
        create(device, || real(context, parameters, flags, device), || *context)
    }

    /// A context for OpenGL's objects.
    fn cuGLCtxCreate(context: *mut usize, flags: u32, device: i32) |real| {
        create(device, || real(context, flags, device), || *context)
    }

    /// A context for OpenGL's objects.
    fn cuGLCtxCreate_v2(context: *mut usize, flags: u32, device: i32) |real| {
        create(device, || real(context, flags, device), || *context)
    }

    /// A context for VDPAU's objects.
    fn cuVDPAUCtxCreate(
        context: *mut usize, flags: u32, device: i32, vdpau: u32, look_up: *const core::ffi::c_void,
    ) |real| {
        create(device, || real(context, flags, device, vdpau, look_up), || *context)
    }

    /// A context for VDPAU's objects.
    fn cuVDPAUCtxCreate_v2(
        context: *mut usize, flags: u32, device: i32, vdpau: u32, look_up: *const core::ffi::c_void,
    ) |real| {
        create(device, || real(context, flags, device, vdpau, look_up), || *context)
    }

    /// Frees a context and all that was allocated in it.
    fn cuCtxDestroy(context: usize) |real| {
        let answer = real(context);
        if answer == SUCCESS {
            gone(context);
        }
        answer
    }

    /// Frees a context and all that was allocated in it.
    fn cuCtxDestroy_v2(context: usize) |real| {
        let answer = real(context);
        if answer == SUCCESS {
            gone(context);
        }
        answer
    }

    /// One hold more on a device's primary context, which the first one makes.
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) |real| {
        if driver::primary_is_active(device) == Some(false) {
            create_with(device, || real(context, device), || *context, |_| { driver::primary_release(device); })
        } else {
            let answer = real(context, device);
            if answer == SUCCESS && let State::Limited(share) = state() {
                Book::with(share, |book| book.find(Kind::Context, *context as u64).map(|entry| entry.references += 1));
            }
            answer
        }
    }

    /// One hold less.
    fn cuDevicePrimaryCtxRelease(device: i32) |real| {
        released(device, || real(device))
    }

    /// One hold less.
    fn cuDevicePrimaryCtxRelease_v2(device: i32) |real| {
        released(device, || real(device))
    }

    /// Frees all that was allocated in it.
    fn cuDevicePrimaryCtxReset(device: i32) |real| {
        released(device, || real(device))
    }

    /// Frees all that was allocated in it.
    fn cuDevicePrimaryCtxReset_v2(device: i32) |real| {
        released(device, || real(device))
    }

    /// Some of a context's limits are memory: the heap of the device's own malloc, and printf's buffer.
    fn cuCtxSetLimit(limit: i32, value: usize) |real| {
        let meets = if SIZED_LIMITS.contains(&limit) { current() } else { Meets::Nothing };
        meets.run(|| real(limit, value), |gpu, set| set_limit(gpu, limit, value, set))
    }
}

fn create(device: i32, make: impl FnOnce() -> CuResult, context: impl Fn() -> usize) -> CuResult {
    // SAFETY: the context that was just made.
    create_with(device, make, context, |context| unsafe {
        driver::ctx_destroy(context);
    })
}

/// Makes a context, measures it, and takes it back with `destroy` where it doesn't fit.
fn create_with(
    device: i32,
    make: impl FnOnce() -> CuResult,
    context: impl Fn() -> usize,
    destroy: impl FnOnce(usize),
) -> CuResult {
    on_device(device).run(make, |gpu, make| measured(gpu, make, context, destroy))
}

fn measured(
    gpu: Gpu,
    make: impl FnOnce() -> CuResult,
    context: impl Fn() -> usize,
    destroy: impl FnOnce(usize),
) -> CuResult {
    let known = known(gpu);
    if let Some(size) = known
        && !gpu.reserve(size)
    {
        return refuse(gpu, size);
    }
    let mut name = Text::<72>::default();
    name.push(gpu.limit().name());
    name.push(b"\0");
    let used = || driver::device_memory_used(name.as_bytes());
    let before = used();
    let answer = make();
    if answer != SUCCESS {
        gpu.give_back(known.unwrap_or(0));
        return answer;
    }
    let more = before.and_then(|before| Some(used()?.saturating_sub(before))).unwrap_or(0);
    learn(gpu, more);
    let size = known.unwrap_or_else(|| more.min(MOST));
    if known.is_none() && !gpu.reserve(size) {
        destroy(context());
        return refuse(gpu, size);
    }
    let handle = context() as u64;
    gpu.book(|book| book.insert(Entry::new(Kind::Context, handle, gpu.number, size, handle)));
    answer
}

fn refuse(gpu: Gpu, size: u64) -> CuResult {
    let mut text = Text::<24>::default();
    text.push_number(size >> 20);
    let text = core::str::from_utf8(text.as_bytes()).unwrap_or_default();
    log::line(&["the driver takes ", text, " MiB for a context, which is more than is left of the GPU memory granted"]);
    gpu.deny()
}

/// What a context takes, where this container knows it.
fn known(gpu: Gpu) -> Option<u64> {
    let known = gpu.share.table.gpus[gpu.number].context.get();
    (LEAST..=MOST).contains(&known).then_some(known)
}

/// Takes in a measurement. NVML tells of the whole card, and others allocate and free meanwhile, so one alone says little;
/// two in a row that agree are believed, and later ones that agree on less.
fn learn(gpu: Gpu, measured: u64) {
    if !(LEAST..=MOST).contains(&measured) {
        return;
    }
    let words = &gpu.share.table.gpus[gpu.number];
    let last = words.measured.get();
    words.measured.set(measured);
    let both = last.max(measured);
    if last.abs_diff(measured) <= SLACK && known(gpu).is_none_or(|known| both < known) {
        words.context.set(both);
    }
}

/// Makes what is counted for this process's contexts no more than what is known by now. Whether there was anything to give
/// back.
pub fn correct(gpu: Gpu) -> bool {
    let Some(known) = known(gpu) else { return false };
    let mut over = 0;
    gpu.book(|book| {
        book.each(|entry| {
            if entry.is_a(Kind::Context) && usize::from(entry.gpu) == gpu.number {
                let more = entry.size.saturating_sub(known);
                entry.size -= more;
                over += more;
            }
        });
    });
    gpu.give_back(over);
    over > 0
}

/// A hold on a primary context was given up, or it was reset. If that ended it, all that was in it is free.
fn released(device: i32, real: impl FnOnce() -> CuResult) -> CuResult {
    let State::Limited(share) = state() else { return real() };
    let context = driver::primary_context(device) as u64;
    let answer = real();
    if answer == SUCCESS && context != 0 && driver::primary_is_active(device) == Some(false) {
        drop_entries(share, context);
    }
    answer
}

fn gone(context: usize) {
    if let State::Limited(share) = state() {
        drop_entries(share, context as u64);
    }
}

fn drop_entries(share: &'static Share, context: u64) {
    const IN_CONTEXT: [Kind; 4] = [Kind::Pointer, Kind::Array, Kind::Context, Kind::ContextLimit];
    Book::with(share, |book| {
        book.remove_where(
            |entry| entry.holder == context && IN_CONTEXT.iter().any(|kind| entry.is_a(*kind)),
            |entry| Gpu::of_entry(share, &entry).give_back(entry.size),
        );
    });
}

/// What the limit had before is in what was measured for the context, or in the book.
fn set_limit(gpu: Gpu, limit: i32, value: usize, set: impl FnOnce() -> CuResult) -> CuResult {
    let mut before = 0;
    // SAFETY: it writes one size.
    if unsafe { driver::ctx_get_limit(&raw mut before, limit) } != SUCCESS {
        before = 0;
    }
    let more = value.saturating_sub(before) as u64;
    let answer = gpu.reserved(more, set);
    if answer == SUCCESS {
        let context = driver::current_context() as u64;
        let key = context.wrapping_add(u64::from(limit.unsigned_abs()));
        let less = before.saturating_sub(value) as u64;
        let over = gpu.book(|book| {
            let over = book.lower(Kind::ContextLimit, key, |_| less);
            book.add(Entry::new(Kind::ContextLimit, key, gpu.number, more, context));
            over
        });
        gpu.give_back(over.flatten().unwrap_or(0));
    }
    answer
}
