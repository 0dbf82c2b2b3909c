//! cuMemCreate and its kin: physical memory, which its handles and its mappings keep.

use gpufence_limiter::share::{State, state};

use crate::{
    account::{self, Gpu, Meets},
    book::{Book, Entry, Kind},
    pools::Properties,
    result::SUCCESS,
};

gpufence_limiter::entry_points! { crate::result::DRIVER, crate::result::NOT_FOUND;
    /// Physical memory.
    fn cuMemCreate(handle: *mut u64, size: usize, properties: *const Properties, flags: u64) |real| {
        let meets = properties.as_ref().map_or(Meets::Nothing, Properties::meets);
        account::allocate(meets, Kind::Physical, size as u64, || real(handle, size, properties, flags), || *handle)
    }

    /// One handle less.
    fn cuMemRelease(handle: u64) |real| {
        let answer = real(handle);
        if answer == SUCCESS {
            change(handle, |entry| entry.references = entry.references.saturating_sub(1));
        }
        answer
    }

    /// One handle more, of what is mapped at an address.
    fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut core::ffi::c_void) |real| {
        let answer = real(handle, address);
        if answer == SUCCESS {
            change(*handle, |entry| entry.references += 1);
        }
        answer
    }

    /// One mapping more.
    fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64) |real| {
        let answer = real(address, size, offset, handle, flags);
        if answer == SUCCESS && let State::Limited(share) = state() {
            Book::with(share, |book| {
                let Some(physical) = book.find(Kind::Physical, handle) else { return };
                physical.holder += 1;
                let gpu = usize::from(physical.gpu);
                book.insert(Entry::new(Kind::Mapping, address, gpu, size as u64, handle));
            });
        }
        answer
    }

    /// Ends all mappings in a range.
    fn cuMemUnmap(address: u64, size: usize) |real| {
        let State::Limited(share) = state() else { return real(address, size) };
        // What a mapping keeps stays counted until it is unmapped indeed.
        let mut several = true;
        let take = |book: &mut Book| {
            let entry = book.remove(Kind::Mapping, address);
            several = entry.is_none_or(|entry| entry.size != size as u64);
            entry
        };
        let answer = account::taken_out(share, take, || real(address, size), unmapped);
        if answer == SUCCESS && several {
            let range = address..address.saturating_add(size as u64);
            while let Some(entry) = Book::with(share, |book| book.remove_in(Kind::Mapping, &range)).flatten() {
                unmapped(entry);
            }
        }
        answer
    }
}

/// A mapping has ended.
fn unmapped(mapping: Entry) {
    change(mapping.holder, |physical| physical.holder = physical.holder.saturating_sub(1));
}

/// Changes what is known of physical memory, and gives it back where nothing keeps it any more.
fn change(handle: u64, work: impl FnOnce(&mut Entry)) {
    let State::Limited(share) = state() else { return };
    let gone = Book::with(share, |book| {
        let entry = book.find(Kind::Physical, handle)?;
        work(entry);
        if entry.references == 0 && entry.holder == 0 { book.remove(Kind::Physical, handle) } else { None }
    });
    if let Some(Some(entry)) = gone {
        Gpu::of_entry(share, &entry).give_back(entry.size);
    }
}
