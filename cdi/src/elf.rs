//! What an ELF library says of itself: its soname and for which machine it is.

use std::{fs::File, path::Path};

use elf::{ElfStream, abi, endian::AnyEndian, file::Class};
use serde::{Deserialize, Serialize};

use crate::error::CdiError;

/// The dynamic linker's flags for a library in `ld.so.cache` (glibc's sysdeps/generic/ldconfig.h): ELF and libc6 with
/// the machine's bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkerFlags(pub i32);

impl LinkerFlags {
    /// 64-bit x86.
    pub const X86_64: Self = Self(0x0303);
    /// 32-bit x86.
    pub const I386: Self = Self(0x0003);
    /// 64-bit Arm.
    pub const AARCH64: Self = Self(0x0a03);
}

/// A shared library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// DT_SONAME, where it has one.
    pub soname: Option<String>,
    /// For the linker's cache. `None` for a machine that we don't know.
    pub flags: Option<LinkerFlags>,
    /// Whether it is a 32-bit one.
    pub is_32_bit: bool,
}

/// Reads a library's headers and dynamic section. `path` is for messages.
pub fn read(file: File, path: &Path) -> Result<Library, CdiError> {
    let malformed = |what: String| CdiError::Malformed { path: path.to_owned(), what };
    let not_elf = |error: elf::ParseError| malformed(format!("not a readable ELF file: {error}"));
    let mut stream = ElfStream::<AnyEndian, _>::open_stream(file).map_err(not_elf)?;
    let flags = match (stream.ehdr.e_machine, stream.ehdr.class) {
        (abi::EM_X86_64, Class::ELF64) => Some(LinkerFlags::X86_64),
        (abi::EM_386, Class::ELF32) => Some(LinkerFlags::I386),
        (abi::EM_AARCH64, Class::ELF64) => Some(LinkerFlags::AARCH64),
        _ => None,
    };
    let is_32_bit = stream.ehdr.class == Class::ELF32;
    let offset = stream
        .dynamic()
        .map_err(not_elf)?
        .and_then(|table| table.iter().find(|entry| entry.d_tag == abi::DT_SONAME))
        .and_then(|entry| usize::try_from(entry.d_val()).ok());
    let mut soname = None;
    if let Some(offset) = offset
        && let Some((_, strings)) = stream.dynamic_symbol_table().map_err(not_elf)?
    {
        soname = strings.get(offset).ok().map(str::to_owned);
    }
    // A soname becomes a file name in the stage: nothing with a slash may pass.
    if let Some(name) = &soname
        && (name.is_empty() || name.contains('/') || name.starts_with('.'))
    {
        return Err(malformed(format!("its soname \"{name}\" is no file name")));
    }
    Ok(Library { soname, flags, is_32_bit })
}
