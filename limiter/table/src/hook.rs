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

    /// An entry point's address; null where the library has none of that name, or isn't there.
    pub fn find(&self, name: &CStr) -> *mut c_void {
        let mut handle = self.handle.load(Ordering::Acquire);
        if handle.is_null() {
            // SAFETY: a C string; for the real driver it only counts up, since we need it and so it is loaded.
            handle = unsafe { dlopen(self.name.as_ptr(), RTLD_LAZY) };
            if handle.is_null() {
                return handle;
            }
            self.handle.store(handle, Ordering::Release);
        }
        // SAFETY: the handle is of a library that stays loaded, and the name is a C string.
        unsafe { dlsym(handle, name.as_ptr()) }
    }
}

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

    /// Its address; null where the library has none. What isn't there is looked up again: it is the rare case.
    pub fn address(&self, library: &Library) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        let found = library.find(self.name);
        self.address.store(found, Ordering::Relaxed);
        found
    }
}
