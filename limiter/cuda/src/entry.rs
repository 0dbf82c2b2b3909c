//! How an entry point of ours stands before the real one of its name.

use core::{
    ffi::{CStr, c_void},
    ptr,
};

use gpufence_limiter::hook::{Library, Symbol};

/// The real driver, by the name that the loader's cache has for it.
pub static DRIVER: Library = Library::new(c"libcuda-driver.so.1");

/// CUresult.
pub type CuResult = i32;
/// `CUDA_SUCCESS`.
pub const SUCCESS: CuResult = 0;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: CuResult = 2;
/// `CUDA_ERROR_NOT_INITIALIZED`.
pub const NOT_INITIALIZED: CuResult = 3;
/// `CUDA_ERROR_DEINITIALIZED`.
pub const DEINITIALIZED: CuResult = 4;
/// `CUDA_ERROR_INVALID_CONTEXT`.
pub const INVALID_CONTEXT: CuResult = 201;
/// `CUDA_ERROR_NOT_FOUND`: what an entry point of ours says whose real one an older driver doesn't have.
pub const NOT_FOUND: CuResult = 500;

/// An entry point of ours.
#[derive(Debug)]
pub struct Hook {
    /// Its name.
    pub name: &'static CStr,
    /// The real one behind it.
    pub real: Symbol,
    /// Its address.
    pub ours: Address,
}

/// The address of a function.
#[derive(Debug, Clone, Copy)]
pub struct Address(pub *const c_void);

// SAFETY: code is the same for every thread.
unsafe impl Sync for Address {}

/// The real entry point of a name, as `F`, which must be a function pointer type. `None`: this driver has none.
///
/// # Safety
/// `F` must be its true type.
pub unsafe fn real<F: Copy>(symbol: &Symbol) -> Option<F> {
    let address = symbol.address(&DRIVER);
    if address.is_null() {
        return None;
    }
    // SAFETY: a function pointer is as large as an address, and the caller answers for its type.
    Some(unsafe { ptr::read(ptr::from_ref(&address).cast()) })
}

/// The name of an identifier as a C string.
///
/// # Panics
/// When it is compiled, for a name with a zero in it or none at its end.
pub const fn c_name(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("not a C string"),
    }
}

/// Defines entry points, and `HOOKS`, the list of them. In a body, the name between bars is the real one.
macro_rules! entry_points {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) |$real:ident| $body:block)*) => {
        $(
            $(#[$attribute])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $kind),*) -> $crate::entry::CuResult {
                type Real = unsafe extern "C" fn($($kind),*) -> $crate::entry::CuResult;
                static SYMBOL: gpufence_limiter::hook::Symbol =
                    gpufence_limiter::hook::Symbol::new($crate::entry::c_name(concat!(stringify!($name), "\0")));
                // SAFETY: the driver's function of this name has these arguments, by its manual.
                let Some($real) = (unsafe { $crate::entry::real::<Real>(&SYMBOL) }) else {
                    return $crate::entry::NOT_FOUND;
                };
                // SAFETY: the arguments are the caller's, passed on as they are; what is read through them is what the
                // driver's manual says they point to.
                unsafe { $body }
            }
        )*

        /// The entry points of this module.
        pub static HOOKS: [$crate::entry::Hook; [$(stringify!($name)),*].len()] = [$(
            $crate::entry::Hook {
                name: $crate::entry::c_name(concat!(stringify!($name), "\0")),
                real: gpufence_limiter::hook::Symbol::new($crate::entry::c_name(concat!(stringify!($name), "\0"))),
                ours: $crate::entry::Address($name as *const core::ffi::c_void),
            },
        )*];
    };
}

/// Declares functions of the real driver that we call ourselves. One that isn't there gives [`NOT_FOUND`].
macro_rules! real_functions {
    ($library:expr; $(fn $name:ident as $symbol:ident($($argument:ident: $kind:ty),* $(,)?);)*) => {
        $(
            #[doc = concat!("`", stringify!($symbol), "`.")]
            pub unsafe fn $name($($argument: $kind),*) -> i32 {
                static SYMBOL: gpufence_limiter::hook::Symbol =
                    gpufence_limiter::hook::Symbol::new($crate::entry::c_name(concat!(stringify!($symbol), "\0")));
                let address = SYMBOL.address(&$library);
                if address.is_null() {
                    return $crate::entry::NOT_FOUND;
                }
                // SAFETY: the function of this name has these arguments, by its manual.
                let real: unsafe extern "C" fn($($kind),*) -> i32 = unsafe { core::mem::transmute(address) };
                // SAFETY: the caller answers for what they point to.
                unsafe { real($($argument),*) }
            }
        )*
    };
}

pub(crate) use {entry_points, real_functions};
