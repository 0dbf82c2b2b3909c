//! What both shadow libraries share. No std and no allocation: it runs inside programs of strangers, on whatever C library
//! their image has.
//!
//! * [`limits`]: the limits file, read once;
//! * [`table`]: the usage table, which all processes of a container share: who holds how much of which GPU;
//! * [`process`]: who a process is, across fork, exec and PID namespaces;
//! * [`share`]: both together, as a process finds them in its container;
//! * [`hook`]: the real library's entry points behind ours;
//! * [`sys`]: system calls, without the C library's versions of them;
//! * [`text`]: numbers and words in small buffers;
//! * [`log`]: one line on standard error, once.

#![cfg_attr(not(test), no_std)]
#![allow(unsafe_code, reason = "system calls and shared memory; each place says why it is sound")]
#![allow(clippy::missing_safety_doc, reason = "the C functions behind them are documented by their vendors")]

pub mod hook;
pub mod limits;
pub mod log;
pub mod process;
pub mod share;
pub mod sys;
pub mod table;
pub mod text;

/// A panic can't happen on purpose here; where one does all the same, the thread stops rather than unwind into C.
#[cfg(all(not(test), panic = "abort"))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    log::line(&["stopped by a fault of its own; please report it"]);
    sys::exit_thread_group(134)
}
