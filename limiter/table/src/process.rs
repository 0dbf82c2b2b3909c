//! Who a process is.

use core::ffi::CStr;

use crate::{
    sys,
    table::Owner,
    text::{self, Text},
};

/// This process, as its /proc shows it. `None` where there is none.
pub fn current() -> Option<Owner> {
    let mut buffer = [0_u8; 24];
    let pid = u32::try_from(text::number(sys::read_link(c"/proc/self", &mut buffer)?)?).ok()?;
    let file = sys::open(c"/proc/self/stat", sys::O_RDONLY_CLOEXEC, 0).ok()?;
    let (view, _) = file.device_and_length().ok()?;
    Some(Owner { pid, start: start_of(&file)?, view })
}

/// Whether /proc has a process of this PID that started then (the low 41 bits, as a table's owner has them). One that
/// can't be read counts as alive.
pub fn is_alive(pid: u32, start: u64) -> bool {
    let mut path = Text::<32>::default();
    path.push(b"/proc/");
    path.push_number(u64::from(pid));
    path.push(b"/stat\0");
    let Ok(path) = CStr::from_bytes_with_nul(path.as_bytes()) else { return true };
    match sys::open(path, sys::O_RDONLY_CLOEXEC, 0) {
        // A process that ends while its file is read has no start time any more, and no memory.
        Ok(file) => start_of(&file).is_some_and(|found| found & ((1 << 41) - 1) == start),
        Err(error) => error != -2,
    }
}

/// Field 22 of `stat`; the second field is a name in brackets that may hold anything.
fn start_of(file: &sys::Descriptor) -> Option<u64> {
    let mut buffer = [0_u8; 1024];
    let content = file.read(&mut buffer).ok()?;
    let after_name = content.iter().rposition(|byte| *byte == b')')? + 2;
    let mut fields = content.get(after_name..)?.split(|byte| *byte == b' ');
    // A zombie has given its memory back.
    if matches!(fields.next()?, b"Z" | b"X") {
        return None;
    }
    text::number(fields.nth(18)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn itself_and_others() {
        let own = current().unwrap();
        assert_eq!(own.pid, std::process::id());
        assert!(is_alive(own.pid, own.start));
        assert!(!is_alive(own.pid, own.start + 1), "another process of the same PID");
        let mut child = std::process::Command::new("/bin/sleep").arg("100").spawn().unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let start: u64 = stat.rsplit(')').next().unwrap().split_whitespace().nth(19).unwrap().parse().unwrap();
        assert!(is_alive(child.id(), start));
        child.kill().unwrap();
        // Not waited for: a zombie.
        while is_alive(child.id(), start) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!is_alive(child.id(), start));
    }
}
