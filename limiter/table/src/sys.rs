//! System calls by number, so that no symbol of a newer C library than the image's is asked for.
//!
//! Each gives the kernel's answer: a negative number is an error.

use core::ffi::{CStr, c_void};

/// Read and write, closed on exec.
pub const O_RDWR_CLOEXEC: usize = 0o2 | 0o2_000_000;
/// Read only, closed on exec.
pub const O_RDONLY_CLOEXEC: usize = 0o2_000_000;
/// Made, and only if it isn't there.
pub const O_CREAT_EXCL: usize = 0o100 | 0o200;
/// `O_NOFOLLOW`.
pub const O_NOFOLLOW: usize = if cfg!(target_arch = "aarch64") { 0o100_000 } else { 0o400_000 };

const AT_FDCWD: isize = -100;

#[cfg(target_arch = "x86_64")]
mod number {
    pub const READ: usize = 0;
    pub const WRITE: usize = 1;
    pub const CLOSE: usize = 3;
    pub const FSTAT: usize = 5;
    pub const MMAP: usize = 9;
    pub const MUNMAP: usize = 11;
    pub const SCHED_YIELD: usize = 24;
    pub const MADVISE: usize = 28;
    pub const NANOSLEEP: usize = 35;
    pub const FTRUNCATE: usize = 77;
    pub const FCHMOD: usize = 91;
    pub const CLOCK_GETTIME: usize = 228;
    pub const EXIT_GROUP: usize = 231;
    pub const OPENAT: usize = 257;
    pub const READLINKAT: usize = 267;
}

#[cfg(target_arch = "aarch64")]
mod number {
    pub const FTRUNCATE: usize = 46;
    pub const FCHMOD: usize = 52;
    pub const OPENAT: usize = 56;
    pub const CLOSE: usize = 57;
    pub const READ: usize = 63;
    pub const WRITE: usize = 64;
    pub const READLINKAT: usize = 78;
    pub const FSTAT: usize = 80;
    pub const EXIT_GROUP: usize = 94;
    pub const NANOSLEEP: usize = 101;
    pub const CLOCK_GETTIME: usize = 113;
    pub const SCHED_YIELD: usize = 124;
    pub const MUNMAP: usize = 215;
    pub const MMAP: usize = 222;
    pub const MADVISE: usize = 233;
}

#[cfg(target_arch = "x86_64")]
unsafe fn call(number: usize, arguments: [usize; 6]) -> isize {
    let answer: isize;
    let [first, second, third, fourth, fifth, sixth] = arguments;
    // SAFETY: the kernel's calling convention; the caller answers for what the arguments point to.
    unsafe {
        core::arch::asm!("syscall", inlateout("rax") number.cast_signed() => answer, in("rdi") first, in("rsi") second,
            in("rdx") third, in("r10") fourth, in("r8") fifth, in("r9") sixth, lateout("rcx") _, lateout("r11") _,
            options(nostack));
    }
    answer
}

#[cfg(target_arch = "aarch64")]
unsafe fn call(number: usize, arguments: [usize; 6]) -> isize {
    let answer: isize;
    let [first, second, third, fourth, fifth, sixth] = arguments;
    // SAFETY: the kernel's calling convention; the caller answers for what the arguments point to.
    unsafe {
        core::arch::asm!("svc 0", in("x8") number, inlateout("x0") first.cast_signed() => answer, in("x1") second,
            in("x2") third, in("x3") fourth, in("x4") fifth, in("x5") sixth, options(nostack));
    }
    answer
}

/// openat(2) from the working folder; every path here is absolute.
pub fn open(path: &CStr, flags: usize, mode: usize) -> Result<Descriptor, isize> {
    // SAFETY: the path is a C string.
    let answer = unsafe { call(number::OPENAT, [AT_FDCWD.cast_unsigned(), path.as_ptr() as usize, flags, mode, 0, 0]) };
    if answer < 0 { Err(answer) } else { Ok(Descriptor(answer.cast_unsigned())) }
}

/// An open file, closed when dropped.
#[derive(Debug)]
pub struct Descriptor(usize);

impl Descriptor {
    /// read(2) until the buffer is full or the file ends.
    pub fn read<'a>(&self, buffer: &'a mut [u8]) -> Result<&'a [u8], isize> {
        let mut filled = 0;
        while filled < buffer.len() {
            let rest = &mut buffer[filled..];
            // SAFETY: the buffer is ours and as long as said.
            let answer = unsafe { call(number::READ, [self.0, rest.as_mut_ptr() as usize, rest.len(), 0, 0, 0]) };
            match answer {
                0 => break,
                -4 => {}
                error if error < 0 => return Err(error),
                count => filled += count.cast_unsigned(),
            }
        }
        Ok(&buffer[..filled])
    }

    /// ftruncate(2).
    pub fn set_length(&self, length: usize) -> isize {
        // SAFETY: no memory is named.
        unsafe { call(number::FTRUNCATE, [self.0, length, 0, 0, 0, 0]) }
    }

    /// fchmod(2).
    pub fn set_mode(&self, mode: usize) -> isize {
        // SAFETY: no memory is named.
        unsafe { call(number::FCHMOD, [self.0, mode, 0, 0, 0, 0]) }
    }

    /// The device number and the length, from fstat(2).
    pub fn device_and_length(&self) -> Result<(u64, u64), isize> {
        let mut status = [0_u64; 32];
        // SAFETY: struct stat has 144 bytes (x86_64) or 128 (aarch64); there is room for 256.
        let answer = unsafe { call(number::FSTAT, [self.0, status.as_mut_ptr() as usize, 0, 0, 0, 0]) };
        // st_dev is its first field, st_size the one at byte 48, on both.
        if answer < 0 { Err(answer) } else { Ok((status[0], status[6])) }
    }

    /// mmap(2) of the file's first bytes, shared and writable.
    pub fn map(&self, length: usize) -> Option<*mut c_void> {
        map(length, 1, self.0)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours.
        unsafe { call(number::CLOSE, [self.0, 0, 0, 0, 0, 0]) };
    }
}

fn map(length: usize, flags: usize, descriptor: usize) -> Option<*mut c_void> {
    // SAFETY: a new mapping, at a place of the kernel's choice; PROT_READ and PROT_WRITE.
    let answer = unsafe { call(number::MMAP, [0, length, 3, flags, descriptor, 0]) };
    if (-4095..0).contains(&answer) {
        None
    } else {
        Some(core::ptr::with_exposed_provenance_mut(answer.cast_unsigned()))
    }
}

/// Private memory of zeros.
pub fn map_private(length: usize) -> Option<*mut c_void> {
    // MAP_PRIVATE and MAP_ANONYMOUS.
    map(length, 0x22, usize::MAX)
}

/// Private memory of zeros, which is zeros again in a child after fork (`MADV_WIPEONFORK`, since Linux 4.14).
pub fn map_wiped_on_fork(length: usize) -> Option<*mut c_void> {
    let memory = map_private(length)?;
    // SAFETY: the mapping is ours.
    let answer = unsafe { call(number::MADVISE, [memory as usize, length, 18, 0, 0, 0]) };
    if answer < 0 {
        unmap(memory, length);
        return None;
    }
    Some(memory)
}

/// munmap(2) of what one of the above gave.
pub fn unmap(memory: *mut c_void, length: usize) {
    // SAFETY: nobody else has it; callers unmap only what they never published or have replaced under their lock.
    unsafe { call(number::MUNMAP, [memory as usize, length, 0, 0, 0, 0]) };
}

/// readlink(2).
pub fn read_link<'a>(path: &CStr, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    let arguments =
        [AT_FDCWD.cast_unsigned(), path.as_ptr() as usize, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0];
    // SAFETY: the path is a C string, the buffer is ours.
    let answer = unsafe { call(number::READLINKAT, arguments) };
    if answer < 0 { None } else { buffer.get(..answer.cast_unsigned()) }
}

/// write(2) to standard error.
pub fn write_error(bytes: &[u8]) {
    // SAFETY: the bytes are readable.
    unsafe { call(number::WRITE, [2, bytes.as_ptr() as usize, bytes.len(), 0, 0, 0]) };
}

/// sched_yield(2).
pub fn yield_now() {
    // SAFETY: no memory is named.
    unsafe { call(number::SCHED_YIELD, [0; 6]) };
}

/// Nanoseconds of `CLOCK_MONOTONIC`, which all processes of a machine share (time namespaces shift it, for one container as
/// a whole).
pub fn now() -> u64 {
    let mut time = [0_u64; 2];
    // SAFETY: struct timespec is two 64-bit numbers.
    unsafe { call(number::CLOCK_GETTIME, [1, time.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    time[0] * 1_000_000_000 + time[1]
}

/// nanosleep(2).
pub fn sleep(nanoseconds: u64) {
    let time = [nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000];
    // SAFETY: struct timespec is two 64-bit numbers.
    unsafe { call(number::NANOSLEEP, [time.as_ptr() as usize, 0, 0, 0, 0, 0]) };
}

/// exit_group(2).
pub fn exit_thread_group(status: usize) -> ! {
    loop {
        // SAFETY: no memory is named, and it doesn't return.
        unsafe { call(number::EXIT_GROUP, [status, 0, 0, 0, 0, 0]) };
    }
}
