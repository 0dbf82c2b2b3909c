//! The real library's entry points behind ours.

use core::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

// Both have been in glibc from the start; unversioned, so that images with an older one than the build's have them too.
unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_LAZY: c_int = 1;

/// A library by the name that the loader's cache has for it.
#[derive(Debug)]
pub struct Library {
    name: &'static CStr,
    handle: AtomicPtr<c_void>,
}

impl Library {
    /// Not yet looked for.
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, handle: AtomicPtr::new(ptr::null_mut()) }
    }

    /// An entry point's address; null where the library has none of that name. `None`: it isn't there itself.
    pub fn find(&self, name: &CStr) -> Option<*mut c_void> {
        let mut handle = self.handle.load(Ordering::Acquire);
        if handle.is_null() {
            // SAFETY: a C string; for the real driver it only counts up, since we need it and so it is loaded.
            handle = unsafe { dlopen(self.name.as_ptr(), RTLD_LAZY) };
            if handle.is_null() {
                return None;
            }
            self.handle.store(handle, Ordering::Release);
        }
        // SAFETY: the handle is of a library that stays loaded, and the name is a C string.
        Some(unsafe { dlsym(handle, name.as_ptr()) })
    }
}

/// In [`Symbol::address`]: looked for, and the library has none.
const ABSENT: *mut c_void = ptr::without_provenance_mut(1);

/// An entry point of a library, looked up once.
#[derive(Debug)]
pub struct Symbol {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Symbol {
    /// Not yet looked up.
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Its address; null where the library has none. A library that isn't there is looked for again.
    pub fn address(&self, library: &Library) -> *mut c_void {
        let mut known = self.address.load(Ordering::Relaxed);
        if known.is_null() {
            let Some(found) = library.find(self.name) else { return known };
            known = if found.is_null() { ABSENT } else { found };
            self.address.store(known, Ordering::Relaxed);
        }
        if known == ABSENT { ptr::null_mut() } else { known }
    }
}

/// An entry point of ours.
#[derive(Debug)]
pub struct Hook {
    /// The real one behind it.
    pub real: &'static Symbol,
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
pub unsafe fn real<F: Copy>(symbol: &Symbol, library: &Library) -> Option<F> {
    let address = symbol.address(library);
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
#[macro_export]
macro_rules! entry_points {
    ($library:expr, $missing:expr; $($(#[$attribute:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) |$real:ident| $body:block)*) => {
        $(
            // A function and a module may have one name: what the function and the list share.
            #[allow(non_snake_case, reason = "the driver's own name")]
            mod $name {
                pub(super) static REAL: $crate::hook::Symbol =
                    $crate::hook::Symbol::new($crate::hook::c_name(concat!(stringify!($name), "\0")));
            }

            $(#[$attribute])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $kind),*) -> i32 {
                type Real = unsafe extern "C" fn($($kind),*) -> i32;
                // SAFETY: the driver's function of this name has these arguments, by its manual.
                let Some($real) = (unsafe { $crate::hook::real::<Real>(&$name::REAL, &$library) }) else {
                    return $missing;
                };
                // SAFETY: the arguments are the caller's, passed on as they are; what is read through them is what the
                // driver's manual says they point to.
                unsafe { $body }
            }
        )*

        /// The entry points of this module.
        pub static HOOKS: [$crate::hook::Hook; [$(stringify!($name)),*].len()] = [$(
            $crate::hook::Hook {
                real: &$name::REAL,
                ours: $crate::hook::Address($name as *const core::ffi::c_void),
            },
        )*];
    };
}

/// Declares functions of the real driver that we call ourselves. One that isn't there gives `$missing`.
#[macro_export]
macro_rules! real_functions {
    ($library:expr, $missing:expr; $(fn $name:ident as $symbol:ident($($argument:ident: $kind:ty),* $(,)?);)*) => {
        $(
            #[doc = concat!("`", stringify!($symbol), "`.")]
            pub unsafe fn $name($($argument: $kind),*) -> i32 {
                static SYMBOL: $crate::hook::Symbol =
                    $crate::hook::Symbol::new($crate::hook::c_name(concat!(stringify!($symbol), "\0")));
                type Real = unsafe extern "C" fn($($kind),*) -> i32;
                // SAFETY: the function of this name has these arguments, by its manual.
                let Some(real) = (unsafe { $crate::hook::real::<Real>(&SYMBOL, &$library) }) else {
                    return $missing;
                };
                // SAFETY: the caller answers for what they point to.
                unsafe { real($($argument),*) }
            }
        )*
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_and_what_is_not() {
        let library = Library::new(c"libc.so.6");
        let (there, absent) = (Symbol::new(c"memcpy"), Symbol::new(c"gpufence_none"));
        for _ in 0..2 {
            assert!(!there.address(&library).is_null());
            assert!(absent.address(&library).is_null());
        }
        let nowhere = Symbol::new(c"memcpy");
        assert!(nowhere.address(&Library::new(c"libgpufence-none.so")).is_null());
        assert!(!nowhere.address(&library).is_null(), "found once the library is there");
    }
}
