//! cuGetProcAddress: the way by which the CUDA runtime finds every entry point since 11.3. The real one chooses, by version
//! and flags, as it would; where its choice is the real one of ours, ours is given instead.

use core::ffi::{c_char, c_void};

use gpufence_limiter::hook::Hook;

use crate::{
    arrays, contexts, graphs, linear, pools, report,
    result::{DRIVER, SUCCESS},
    virtual_memory,
};

gpufence_limiter::entry_points! { crate::result::DRIVER, crate::result::NOT_FOUND;
    /// Of CUDA 11.3 to 11.8.
    fn cuGetProcAddress(symbol: *const c_char, address: *mut *const c_void, version: i32, flags: u64) |real| {
        let answer = real(symbol, address, version, flags);
        if answer == SUCCESS && !address.is_null() {
            *address = ours_for(*address);
        }
        answer
    }

    /// Since CUDA 12.0.
    fn cuGetProcAddress_v2(
        symbol: *const c_char, address: *mut *const c_void, version: i32, flags: u64, status: *mut i32,
    ) |real| {
        let answer = real(symbol, address, version, flags, status);
        if answer == SUCCESS && !address.is_null() {
            *address = ours_for(*address);
        }
        answer
    }
}

/// All entry points of the library.
pub fn all() -> impl Iterator<Item = &'static Hook> {
    let modules = [
        &linear::HOOKS[..],
        &pools::HOOKS[..],
        &virtual_memory::HOOKS[..],
        &arrays::HOOKS[..],
        &graphs::HOOKS[..],
        &contexts::HOOKS[..],
        &report::HOOKS[..],
        &HOOKS[..],
        #[cfg(feature = "compute")]
        &crate::launches::HOOKS[..],
    ];
    modules.into_iter().flatten()
}

fn ours_for(address: *const c_void) -> *const c_void {
    if address.is_null() {
        return address;
    }
    let hook = all().find(|hook| hook.real.address(&DRIVER).cast_const() == address);
    hook.map_or(address, |hook| hook.ours.0)
}
