//! The compute limit. Each launch stands between two events, which tell how long the GPU was at it; that time, divided by
//! the share, is how long the container's launches then wait. All its processes wait on the same clock, in the usage table.
//!
//! It is a cap on the time in which the container keeps the GPU busy, not a promise of any: kernels that run side by side
//! count one by one, and one that others' time slices hold up counts longer than it ran.

use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use gpufence_limiter::{sys, table::Word};

use crate::{
    account::{Gpu, current},
    driver,
    result::{CuResult, SUCCESS},
};

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: i32 = 600;
/// As many launches can be under way before the next one waits for the first.
const PAIRS: usize = 64;
/// For at most so long may the GPU be given work ahead, nanoseconds: what is under way isn't yet charged.
const AHEAD: u64 = 10_000_000;
/// How long the last launch that was measured kept the GPU busy, nanoseconds; 0: none was.
static LAST_BUSY: AtomicU64 = AtomicU64::new(0);
/// The longest single sleep, nanoseconds: what ended meanwhile is then looked at.
const NAP: u64 = 5_000_000;

const NOT_MADE: u32 = 0;
const FREE: u32 = 1;
const CLAIMED: u32 = 2;
const UNDER_WAY: u32 = 3;

/// Two events of a context.
struct Pair {
    state: AtomicU32,
    context: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    gpu: AtomicUsize,
}

impl Pair {
    const fn new() -> Self {
        Self {
            state: AtomicU32::new(NOT_MADE),
            context: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            gpu: AtomicUsize::new(0),
        }
    }

    fn claim(&self, from: u32) -> bool {
        self.state.compare_exchange(from, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    fn release(&self, state: u32) {
        self.state.store(state, Ordering::Release);
    }

    /// Makes the events, for the current context.
    fn make(&self, context: usize) -> bool {
        let (mut start, mut end) = (0, 0);
        // SAFETY: each writes one handle.
        let made = unsafe {
            driver::event_create(&raw mut start, 0) == SUCCESS && driver::event_create(&raw mut end, 0) == SUCCESS
        };
        self.context.store(context, Ordering::Relaxed);
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        made
    }
}

static UNDER: [Pair; PAIRS] = [const { Pair::new() }; PAIRS];

/// CUlaunchConfig, as far as the stream.
#[repr(C)]
#[derive(Debug)]
pub struct LaunchConfiguration {
    dimensions: [u32; 6],
    shared: u32,
    stream: usize,
}

/// CUDA_LAUNCH_PARAMS, as far as the stream.
#[repr(C)]
#[derive(Debug)]
pub struct LaunchParameters {
    function: usize,
    dimensions: [u32; 6],
    shared: u32,
    stream: usize,
}

gpufence_limiter::entry_points! { crate::result::DRIVER, crate::result::NOT_FOUND;
    /// A kernel.
    fn cuLaunchKernel(
        function: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: usize,
        parameters: usize, extra: usize,
    ) |real| {
        timed(stream, || real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra))
    }

    /// The same, on the thread's own default stream.
    fn cuLaunchKernel_ptsz(
        function: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: usize,
        parameters: usize, extra: usize,
    ) |real| {
        let own = driver::per_thread(stream);
        timed(own, || real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra))
    }

    /// A kernel with attributes.
    fn cuLaunchKernelEx(
        configuration: *const LaunchConfiguration, function: usize, parameters: usize, extra: usize,
    ) |real| {
        let stream = configuration.as_ref().map_or(0, |configuration| configuration.stream);
        timed(stream, || real(configuration, function, parameters, extra))
    }

    /// The same, on the thread's own default stream.
    fn cuLaunchKernelEx_ptsz(
        configuration: *const LaunchConfiguration, function: usize, parameters: usize, extra: usize,
    ) |real| {
        let stream = driver::per_thread(configuration.as_ref().map_or(0, |configuration| configuration.stream));
        timed(stream, || real(configuration, function, parameters, extra))
    }

    /// A kernel whose blocks work together.
    fn cuLaunchCooperativeKernel(
        function: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: usize,
        parameters: usize,
    ) |real| {
        timed(stream, || real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters))
    }

    /// The same, on the thread's own default stream.
    fn cuLaunchCooperativeKernel_ptsz(
        function: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: usize,
        parameters: usize,
    ) |real| {
        let own = driver::per_thread(stream);
        timed(own, || real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters))
    }

    /// One kernel on several devices: the first one's is measured.
    fn cuLaunchCooperativeKernelMultiDevice(list: *mut LaunchParameters, count: u32, flags: u32) |real| {
        let stream = list.as_ref().map_or(0, |first| first.stream);
        timed(stream, || real(list, count, flags))
    }

    /// A graph, as a whole.
    fn cuGraphLaunch(graph: usize, stream: usize) |real| {
        timed(stream, || real(graph, stream))
    }

    /// The same, on the thread's own default stream.
    fn cuGraphLaunch_ptsz(graph: usize, stream: usize) |real| {
        timed(driver::per_thread(stream), || real(graph, stream))
    }

    /// One block, of CUDA 3.
    fn cuLaunch(function: usize) |real| {
        timed(0, || real(function))
    }

    /// A grid, of CUDA 3.
    fn cuLaunchGrid(function: usize, width: i32, height: i32) |real| {
        timed(0, || real(function, width, height))
    }

    /// A grid on a stream, of CUDA 3.
    fn cuLaunchGridAsync(function: usize, width: i32, height: i32, stream: usize) |real| {
        timed(stream, || real(function, width, height, stream))
    }
}

/// Launches, when the container's time has come, and measures.
fn timed(stream: usize, launch: impl FnOnce() -> CuResult) -> CuResult {
    current().run(launch, |gpu, launch| timed_on(gpu, stream, launch))
}

fn timed_on(gpu: Gpu, stream: usize, launch: impl FnOnce() -> CuResult) -> CuResult {
    // What is captured into a graph runs later, and an event would become part of it.
    if gpu.limit().compute_percent >= 100 || !driver::is_ordinary(stream) {
        return launch();
    }
    let context = driver::current_context();
    let pair = claim(gpu, context);
    wait(gpu);
    let Some(pair) = pair else { return launch() };
    // SAFETY: an event and a stream of the current context.
    let mut measured = unsafe { driver::event_record(pair.start.load(Ordering::Relaxed), stream) } == SUCCESS;
    if !measured {
        // The events of a context that is gone, whose handle another one has by now.
        // SAFETY: as above.
        measured = pair.make(context)
            && unsafe { driver::event_record(pair.start.load(Ordering::Relaxed), stream) } == SUCCESS;
    }
    let answer = launch();
    // SAFETY: as above.
    let ended = measured && unsafe { driver::event_record(pair.end.load(Ordering::Relaxed), stream) } == SUCCESS;
    pair.gpu.store(gpu.number, Ordering::Relaxed);
    pair.release(if ended {
        UNDER_WAY
    } else if measured {
        FREE
    } else {
        NOT_MADE
    });
    answer
}

/// Waits until the container has waited for what it has used.
fn wait(gpu: Gpu) {
    let clock = &gpu.share.table.gpus[gpu.number];
    collect(gpu);
    let began = sys::now();
    let mut now = began;
    loop {
        // Noise in the table is no reason to wait for ever: a minute is more than launches come to.
        let left = clock.resume.get().saturating_sub(now);
        if left == 0 || left > 60_000_000_000 {
            break;
        }
        sys::sleep(left.min(NAP));
        collect(gpu);
        now = sys::now();
    }
    if now > began {
        clock.throttled.add(now - began);
    }
}

/// Takes in what has ended.
fn collect(gpu: Gpu) {
    for pair in &UNDER {
        if !pair.claim(UNDER_WAY) {
            continue;
        }
        let (start, end) = (pair.start.load(Ordering::Relaxed), pair.end.load(Ordering::Relaxed));
        let mut milliseconds = 0.0_f32;
        // SAFETY: events that were recorded; one whose context is gone is refused.
        match unsafe { driver::event_query(end) } {
            NOT_READY => pair.release(UNDER_WAY),
            // SAFETY: both have been reached.
            SUCCESS if unsafe { driver::event_elapsed(&raw mut milliseconds, start, end) } == SUCCESS => {
                let number = pair.gpu.load(Ordering::Relaxed);
                pair.release(FREE);
                // A whole number of nanoseconds, and a day at most.
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded before")]
                let busy = (milliseconds.clamp(0.0, 86_400_000.0) * 1_000_000.0) as u64;
                LAST_BUSY.store(busy.max(1), Ordering::Relaxed);
                charge(Gpu { number, ..gpu }, busy);
            }
            _ => pair.release(NOT_MADE),
        }
    }
}

/// The GPU was busy for us for so long: launches go on when that, divided by the share, has passed since it began.
fn charge(gpu: Gpu, busy: u64) {
    let clock = &gpu.share.table.gpus[gpu.number].resume;
    let cost = busy * 100 / u64::from(gpu.limit().compute_percent.max(1));
    let began = sys::now().saturating_sub(busy);
    loop {
        let before = clock.get();
        if clock.swap_if(before, before.max(began).saturating_add(cost)) {
            return;
        }
    }
}

/// How many launches may be under way: two, until it is known how long they take.
fn most_under_way() -> usize {
    match LAST_BUSY.load(Ordering::Relaxed) {
        0 => 2,
        busy => usize::try_from(AHEAD / busy).unwrap_or(PAIRS).clamp(2, PAIRS),
    }
}

/// A pair of the current context's; one under way is waited for where there are as many as there may be.
fn claim(gpu: Gpu, context: usize) -> Option<&'static Pair> {
    let under_way = |pair: &&Pair| pair.state.load(Ordering::Acquire) == UNDER_WAY;
    for _ in 0..PAIRS {
        if UNDER.iter().filter(under_way).count() >= most_under_way() {
            let Some(first) = UNDER.iter().find(under_way) else { continue };
            // SAFETY: an event that was recorded; one whose context is gone is refused, and then taken out.
            unsafe { driver::event_synchronize(first.end.load(Ordering::Relaxed)) };
            collect(gpu);
            continue;
        }
        let of_context = |pair: &&Pair| pair.context.load(Ordering::Relaxed) == context;
        if let Some(pair) = UNDER.iter().filter(of_context).find(|pair| pair.claim(FREE)) {
            return Some(pair);
        }
        if let Some(pair) = UNDER.iter().find(|pair| pair.claim(NOT_MADE)) {
            if pair.make(context) {
                return Some(pair);
            }
            pair.release(NOT_MADE);
            return None;
        }
        // A free pair of another context is of no use here.
        if let Some(pair) = UNDER.iter().find(|pair| !of_context(pair) && pair.claim(FREE)) {
            if pair.make(context) {
                return Some(pair);
            }
            pair.release(NOT_MADE);
        }
    }
    None
}
