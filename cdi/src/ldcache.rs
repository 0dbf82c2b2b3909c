//! glibc's `ld.so.cache`: the old, the new and the compound format are read, the new one is written.
//!
//! The layout is that of glibc's `sysdeps/generic/dl-cache.h`; which entry the loader takes is decided by
//! `elf/dl-cache.c`: a binary search over names in descending order of `_dl_cache_libcmp`, then the first fitting entry
//! among equal names. Ours therefore stand before the image's own of the same name.

use std::{borrow::Cow, cmp::Ordering};

use thiserror::Error;

const OLD_MAGIC: &[u8] = b"ld.so-1.7.0";
const OLD_HEADER: usize = 16;
const OLD_ENTRY: usize = 12;
const NEW_MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const NEW_HEADER: usize = 48;
const NEW_ENTRY: usize = 24;
const EXTENSION_MAGIC: u32 = 0xeaa4_2174;
const TAG_GENERATOR: u32 = 0;
const TAG_HWCAPS: u32 = 1;
/// An entry whose hwcap field is an index into the hwcaps extension has this bit set (`DL_CACHE_HWCAP_EXTENSION`).
const HWCAP_EXTENSION: u64 = 1 << 62;
/// More entries than any real cache has; a count beyond it is not worth allocating for.
const MAX_ENTRIES: usize = 1 << 18;

/// One library in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Kind and machine, as [`crate::elf::LinkerFlags`].
    pub flags: i32,
    /// The name that programs ask for, such as `libcuda.so.1`.
    pub name: Cow<'a, [u8]>,
    /// The path of the file.
    pub path: Cow<'a, [u8]>,
    /// Unused by glibc since 2.36; kept.
    pub os_version: u32,
    /// Zero, a bit mask, or an index into [`Cache::hwcaps`].
    pub hwcap: u64,
}

/// A cache in memory. Entries stand in the file's order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cache<'a> {
    /// The libraries.
    pub entries: Vec<Entry<'a>>,
    /// The names of glibc-hwcaps subfolders that entries refer to, such as `x86-64-v3`.
    pub hwcaps: Vec<Cow<'a, [u8]>>,
    /// What wrote the file.
    pub generator: Option<Cow<'a, [u8]>>,
}

/// A cache that can't be read.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("not a usable ld.so.cache: {0}")]
pub struct LdCacheError(&'static str);

/// Reads a cache in any of the formats.
pub fn parse(bytes: &[u8]) -> Result<Cache<'_>, LdCacheError> {
    if bytes.starts_with(NEW_MAGIC) {
        return parse_new(bytes);
    }
    if !bytes.starts_with(OLD_MAGIC) {
        return Err(LdCacheError("neither of the two magic words at its start"));
    }
    let count = count(bytes, 12)?;
    let end = OLD_HEADER + count * OLD_ENTRY;
    // A compound file has the new format behind the old entries, aligned for its 64-bit fields.
    if let Some(new) = bytes.get(end.next_multiple_of(8)..)
        && new.starts_with(NEW_MAGIC)
    {
        return parse_new(new);
    }
    let strings = bytes.get(end..).ok_or(LdCacheError("shorter than its entries"))?;
    let entries = (0..count)
        .map(|index| {
            let at = OLD_HEADER + index * OLD_ENTRY;
            Ok(Entry {
                flags: word(bytes, at)?.cast_signed(),
                name: string(strings, word(bytes, at + 4)?)?,
                path: string(strings, word(bytes, at + 8)?)?,
                os_version: 0,
                hwcap: 0,
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(Cache { entries, ..Cache::default() })
}

fn parse_new(bytes: &[u8]) -> Result<Cache<'_>, LdCacheError> {
    // The endianness byte: 0 from before it was written, 2 little, 3 big.
    if bytes.get(28).is_some_and(|flags| flags & 3 == 3) {
        return Err(LdCacheError("written for a big-endian machine"));
    }
    let count = count(bytes, 20)?;
    let entries = (0..count)
        .map(|index| {
            let at = NEW_HEADER + index * NEW_ENTRY;
            Ok(Entry {
                flags: word(bytes, at)?.cast_signed(),
                name: string(bytes, word(bytes, at + 4)?)?,
                path: string(bytes, word(bytes, at + 8)?)?,
                os_version: word(bytes, at + 12)?,
                hwcap: u64::from(word(bytes, at + 16)?) | u64::from(word(bytes, at + 20)?) << 32,
            })
        })
        .collect::<Result<_, _>>()?;
    let mut cache = Cache { entries, ..Cache::default() };
    let extensions = word(bytes, 32)? as usize;
    if extensions != 0 && word(bytes, extensions) == Ok(EXTENSION_MAGIC) {
        parse_extensions(bytes, extensions, &mut cache)?;
    }
    Ok(cache)
}

fn parse_extensions<'a>(bytes: &'a [u8], at: usize, cache: &mut Cache<'a>) -> Result<(), LdCacheError> {
    let sections = (word(bytes, at + 4)? as usize).min(16);
    for section in 0..sections {
        let header = at + 8 + section * 16;
        let (offset, size) = (word(bytes, header + 8)? as usize, word(bytes, header + 12)? as usize);
        let data =
            bytes.get(offset..offset.saturating_add(size)).ok_or(LdCacheError("an extension lies outside it"))?;
        match word(bytes, header)? {
            TAG_GENERATOR => cache.generator = Some(Cow::Borrowed(data)),
            TAG_HWCAPS => {
                cache.hwcaps = data
                    .chunks_exact(4)
                    .map(|name| string(bytes, u32::from_le_bytes(name.try_into().expect("a chunk of four"))))
                    .collect::<Result<_, _>>()?;
            }
            _ => {}
        }
    }
    Ok(())
}

fn word(bytes: &[u8], at: usize) -> Result<u32, LdCacheError> {
    bytes
        .get(at..at + 4)
        .map(|four| u32::from_le_bytes(four.try_into().expect("a slice of four")))
        .ok_or(LdCacheError("shorter than its entries"))
}

fn count(bytes: &[u8], at: usize) -> Result<usize, LdCacheError> {
    let count = word(bytes, at)? as usize;
    if count > MAX_ENTRIES { Err(LdCacheError("too many entries")) } else { Ok(count) }
}

fn string(bytes: &[u8], offset: u32) -> Result<Cow<'_, [u8]>, LdCacheError> {
    let tail = bytes.get(offset as usize..).ok_or(LdCacheError("a string lies outside it"))?;
    let end = tail.iter().position(|byte| *byte == 0).ok_or(LdCacheError("a string has no end"))?;
    Ok(Cow::Borrowed(&tail[..end]))
}

/// The loader's order of names (`_dl_cache_libcmp`): digits compare as numbers and stand above other characters.
pub fn compare_names(left: &[u8], right: &[u8]) -> Ordering {
    let (mut left, mut right) = (left, right);
    loop {
        match (left.first(), right.first()) {
            (None, None) => return Ordering::Equal,
            (None, Some(_)) => return Ordering::Less,
            (Some(_), None) => return Ordering::Greater,
            (Some(a), Some(b)) => match (a.is_ascii_digit(), b.is_ascii_digit()) {
                (true, true) => {
                    let ((a, rest_left), (b, rest_right)) = (number(left), number(right));
                    if a != b {
                        return a.cmp(&b);
                    }
                    (left, right) = (rest_left, rest_right);
                }
                (true, false) => return Ordering::Greater,
                (false, true) => return Ordering::Less,
                (false, false) if a != b => return a.cast_signed().cmp(&b.cast_signed()),
                (false, false) => (left, right) = (&left[1..], &right[1..]),
            },
        }
    }
}

/// The number at the start, with the overflow of C's `int`, and what follows it.
fn number(text: &[u8]) -> (i32, &[u8]) {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let value =
        text[..end].iter().fold(0_i32, |value, digit| value.wrapping_mul(10).wrapping_add(i32::from(digit - b'0')));
    (value, &text[end..])
}

impl<'a> Cache<'a> {
    /// Adds libraries in front of those with the same name, and puts all in the order that the loader searches.
    pub fn prepend(&mut self, ours: impl IntoIterator<Item = Entry<'a>>) {
        let mut entries: Vec<_> = ours.into_iter().collect();
        entries.append(&mut self.entries);
        // Stable, so that equal names keep their order: ours, then the image's as they were.
        entries.sort_by(|a, b| compare_names(&b.name, &a.name));
        self.entries = entries;
    }

    /// Writes the new format.
    pub fn write(&self) -> Vec<u8> {
        let strings_start = NEW_HEADER + self.entries.len() * NEW_ENTRY;
        let mut strings = Vec::new();
        let mut intern = |text: &[u8]| {
            let offset = as_u32(strings_start + strings.len());
            strings.extend_from_slice(text);
            strings.push(0);
            offset
        };
        let mut entries = Vec::with_capacity(self.entries.len() * NEW_ENTRY);
        for entry in &self.entries {
            entries.extend(entry.flags.to_le_bytes());
            entries.extend(intern(&entry.name).to_le_bytes());
            entries.extend(intern(&entry.path).to_le_bytes());
            entries.extend(entry.os_version.to_le_bytes());
            entries.extend(entry.hwcap.to_le_bytes());
        }
        let hwcaps: Vec<u8> = self.hwcaps.iter().flat_map(|name| intern(name).to_le_bytes()).collect();

        let mut sections: Vec<(u32, &[u8])> = Vec::new();
        if let Some(generator) = &self.generator {
            sections.push((TAG_GENERATOR, generator));
        }
        if !hwcaps.is_empty() {
            sections.push((TAG_HWCAPS, &hwcaps));
        }
        let extensions = (strings_start + strings.len()).next_multiple_of(4);

        let mut file = Vec::with_capacity(extensions + 64);
        file.extend_from_slice(NEW_MAGIC);
        file.extend(as_u32(self.entries.len()).to_le_bytes());
        file.extend(as_u32(strings.len()).to_le_bytes());
        file.extend([2, 0, 0, 0]); // little-endian
        file.extend(if sections.is_empty() { 0 } else { as_u32(extensions) }.to_le_bytes());
        file.extend([0; 12]);
        file.extend(entries);
        file.extend(strings);
        if !sections.is_empty() {
            file.resize(extensions, 0);
            file.extend(EXTENSION_MAGIC.to_le_bytes());
            file.extend(as_u32(sections.len()).to_le_bytes());
            // The hwcaps section is an array of words and comes aligned, whatever the generator's length.
            let mut at = extensions + 8 + sections.len() * 16;
            let mut data = Vec::new();
            for (tag, bytes) in sections {
                let padding = at.next_multiple_of(4) - at;
                data.resize(data.len() + padding, 0);
                at += padding;
                for value in [tag, 0, as_u32(at), as_u32(bytes.len())] {
                    file.extend(value.to_le_bytes());
                }
                data.extend_from_slice(bytes);
                at += bytes.len();
            }
            file.extend(data);
        }
        file
    }

    /// The name of the glibc-hwcaps subfolder that an entry is for, if any.
    pub fn hwcap_name(&self, entry: &Entry<'_>) -> Option<&[u8]> {
        if entry.hwcap & HWCAP_EXTENSION == 0 {
            return None;
        }
        self.hwcaps.get((entry.hwcap & 0xffff_ffff) as usize).map(|name| &**name)
    }
}

/// Offsets in the format have 32 bits; a cache of our making stays far below.
fn as_u32(length: usize) -> u32 {
    u32::try_from(length).expect("a cache of less than 4 GiB")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(name: &'static str, path: &'static str) -> Entry<'static> {
        Entry {
            flags: 0x303,
            name: Cow::Borrowed(name.as_bytes()),
            path: Cow::Borrowed(path.as_bytes()),
            os_version: 0,
            hwcap: 0,
        }
    }

    #[test]
    fn order_of_names() {
        for (left, right, expected) in [
            ("libc.so.6", "libc.so.6", Ordering::Equal),
            ("libx.so.10", "libx.so.9", Ordering::Greater),
            ("libx.so.1", "libx.so", Ordering::Greater),
            ("libx1.so", "libxa.so", Ordering::Greater),
            ("liba.so", "libb.so", Ordering::Less),
            ("libx.so.007", "libx.so.7", Ordering::Equal),
        ] {
            assert_eq!(compare_names(left.as_bytes(), right.as_bytes()), expected, "{left} {right}");
        }
    }

    #[test]
    fn ours_come_first_and_the_image_s_keep_their_order() {
        let mut cache = Cache {
            entries: vec![
                entry("libz.so.1", "/lib/libz.so.1"),
                entry("libcuda.so.1", "/image/a/libcuda.so.1"),
                entry("libcuda.so.1", "/image/b/libcuda.so.1"),
                entry("liba.so.1", "/lib/liba.so.1"),
            ],
            ..Cache::default()
        };
        cache.prepend([
            entry("libcuda.so.1", "/ours/libcuda.so.1"),
            entry("libnvidia-ml.so.1", "/ours/libnvidia-ml.so.1"),
        ]);
        let paths: Vec<_> =
            cache.entries.iter().map(|entry| String::from_utf8_lossy(&entry.path).into_owned()).collect();
        assert_eq!(
            paths,
            [
                "/lib/libz.so.1",
                "/ours/libnvidia-ml.so.1",
                "/ours/libcuda.so.1",
                "/image/a/libcuda.so.1",
                "/image/b/libcuda.so.1",
                "/lib/liba.so.1"
            ]
        );
    }

    #[test]
    fn reads_the_old_and_the_compound_format() {
        let mut old = OLD_MAGIC.to_vec();
        old.push(0);
        old.extend(1_u32.to_le_bytes());
        old.extend([3_u32, 0, 6].iter().flat_map(|value| value.to_le_bytes()));
        let mut compound = old.clone();
        old.extend(b"liba.0/lib/a\0".map(|byte| if byte == b'0' { 0 } else { byte }));
        let cache = parse(&old).unwrap();
        assert_eq!((&*cache.entries[0].name, &*cache.entries[0].path), (&b"liba."[..], &b"/lib/a"[..]));

        compound.resize(compound.len().next_multiple_of(8), 0);
        let new = Cache { entries: vec![entry("libb.so", "/lib/libb.so")], ..Cache::default() };
        compound.extend(new.write());
        assert_eq!(parse(&compound).unwrap(), new);
    }

    #[test]
    fn the_host_s_own_cache_survives_a_round_trip() {
        let bytes = std::fs::read("/etc/ld.so.cache").unwrap();
        let cache = parse(&bytes).unwrap();
        assert!(cache.entries.iter().any(|entry| &*entry.name == b"libc.so.6"));
        let written = cache.write();
        assert_eq!(parse(&written).unwrap(), cache);
    }

    #[test]
    fn glibc_s_own_ldconfig_prints_what_we_write() {
        let bytes = std::fs::read("/etc/ld.so.cache").unwrap();
        let mut cache = parse(&bytes).unwrap();
        cache.prepend([entry("libcuda.so.1", "/usr/lib/gpufence/compute/libcuda.so.1")]);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), cache.write()).unwrap();
        let print = |path: &std::path::Path| {
            let output = std::process::Command::new("/sbin/ldconfig").arg("-p").arg("-C").arg(path).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        let (ours, host) = (print(file.path()), print(std::path::Path::new("/etc/ld.so.cache")));
        assert!(ours.contains("libcuda.so.1 (libc6,x86-64) => /usr/lib/gpufence/compute/libcuda.so.1"), "{ours}");
        let rest = |text: &str| {
            text.lines().skip(1).filter(|line| !line.contains("gpufence")).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(rest(&ours), rest(&host));
    }

    #[test]
    fn refuses_noise() {
        for bytes in [&b""[..], b"x", b"ld.so-1.7.0\0\xff\xff\xff\xff", b"ld.so-1.7.0\0\x01\0\0\0", NEW_MAGIC] {
            assert!(parse(bytes).is_err(), "{bytes:?}");
        }
    }

    prop_compose! {
        fn any_entry()(flags in any::<i32>(), name in "[a-z0-9.]{0,12}", path in "/[a-z/]{0,12}", os_version in any::<u32>(), hwcap in any::<u64>()) -> Entry<'static> {
            Entry { flags, name: Cow::Owned(name.into_bytes()), path: Cow::Owned(path.into_bytes()), os_version, hwcap }
        }
    }

    proptest! {
        #[test]
        fn reads_what_it_writes(
            entries in prop::collection::vec(any_entry(), 0..40),
            hwcaps in prop::collection::vec("[a-z0-9-]{1,10}", 0..4),
            generator in prop::option::of("[a-z ]{0,20}"),
        ) {
            let cache = Cache {
                entries,
                hwcaps: hwcaps.into_iter().map(|name| Cow::Owned(name.into_bytes())).collect(),
                generator: generator.map(|text| Cow::Owned(text.into_bytes())),
            };
            let written = cache.write();
            prop_assert_eq!(parse(&written).unwrap(), cache);
        }

        #[test]
        fn never_panics(noise in prop::collection::vec(any::<u8>(), 0..400), old in any::<bool>()) {
            let mut bytes = if old { OLD_MAGIC.to_vec() } else { NEW_MAGIC.to_vec() };
            bytes.extend(noise);
            let _ = parse(&bytes);
        }
    }
}
