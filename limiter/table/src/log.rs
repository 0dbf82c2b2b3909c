//! One line on standard error.

use core::sync::atomic::{AtomicBool, Ordering};

use crate::{sys, text::Text};

/// Writes `gpufence: ` and the parts as one line.
pub fn line(parts: &[&str]) {
    let mut text = Text::<512>::default();
    text.push(b"gpufence: ");
    for part in parts {
        text.push(part.as_bytes());
    }
    text.push(b"\n");
    sys::write_error(text.as_bytes());
}

/// The same, once for each `said`.
pub fn once(said: &AtomicBool, parts: &[&str]) {
    if !said.swap(true, Ordering::Relaxed) {
        line(parts);
    }
}
