//! Memory the kernels own: zeroed, cache-line aligned buffers whose large members live in huge pages, and byte ranges
//! that are either such a buffer or a read-only mapping that somebody else keeps alive.
//!
//! A buffer is sized once and never grows; the hot path allocates nothing. Mapping files is the caller's business.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit, Zeroable};

/// One cache line, and one AVX-512 vector.
pub const ALIGNMENT: usize = 64;
/// From this size on a buffer is an anonymous mapping aligned to, and advised as, huge pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A zeroed buffer of plain values, at least 64-byte aligned.
///
/// Large buffers are anonymous mappings: the kernel hands out zero pages on first touch, so reserving more than is used
/// costs address space only.
pub struct AlignedBuf<T> {
    ptr: NonNull<T>,
    len: usize,
    backing: Backing,
    _owns: PhantomData<T>,
}

enum Backing {
    Empty,
    Heap(Layout),
    /// Start and length of the whole mapping, which is larger than the buffer by the alignment slack.
    Mapping {
        base: NonNull<u8>,
        bytes: usize,
    },
}

// SAFETY: the buffer owns its memory exclusively, like a Vec.
unsafe impl<T: Send> Send for AlignedBuf<T> {}
// SAFETY: shared access only hands out `&[T]`.
unsafe impl<T: Sync> Sync for AlignedBuf<T> {}

impl<T: Zeroable + Copy> AlignedBuf<T> {
    /// A buffer of `len` zeroed values.
    ///
    /// Aborts through the allocation error handler when the system has no memory, as `Vec` does.
    pub fn zeroed(len: usize) -> AlignedBuf<T> {
        let bytes = len.checked_mul(size_of::<T>()).expect("a buffer's size fits the address space");
        assert!(align_of::<T>() <= ALIGNMENT, "element alignment above a cache line");
        if bytes == 0 {
            return AlignedBuf { ptr: NonNull::dangling(), len, backing: Backing::Empty, _owns: PhantomData };
        }
        if bytes >= HUGE_PAGE_BYTES
            && let Some((base, start, mapped)) = map_huge(bytes)
        {
            return AlignedBuf {
                ptr: start.cast(),
                len,
                backing: Backing::Mapping { base, bytes: mapped },
                _owns: PhantomData,
            };
        }
        let layout = Layout::from_size_align(bytes.next_multiple_of(ALIGNMENT), ALIGNMENT)
            .expect("a size below the address space with a power-of-two alignment is a layout");
        // SAFETY: the layout's size is not zero.
        let raw = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(raw.cast::<T>()) else { handle_alloc_error(layout) };
        AlignedBuf { ptr, len, backing: Backing::Heap(layout), _owns: PhantomData }
    }
}

/// Maps `bytes` plus slack and returns (mapping, first huge-page boundary in it, mapped length).
fn map_huge(bytes: usize) -> Option<(NonNull<u8>, NonNull<u8>, usize)> {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
    let mapped = bytes.checked_add(HUGE_PAGE_BYTES)?;
    // SAFETY: a fresh private anonymous mapping at an address the kernel picks aliases nothing.
    let base = unsafe {
        mmap_anonymous(std::ptr::null_mut(), mapped, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).ok()?
    };
    let base = NonNull::new(base.cast::<u8>())?;
    let slack = base.as_ptr().align_offset(HUGE_PAGE_BYTES);
    // SAFETY: slack < HUGE_PAGE_BYTES, which the mapping was enlarged by.
    let start = unsafe { base.add(slack) };
    // Without huge pages the buffer still works, only slower; a kernel that refuses the advice is no reason to fail.
    // SAFETY: the range lies inside the mapping made above.
    let _ = unsafe { madvise(start.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
    Some((base, start, mapped))
}

impl<T> Drop for AlignedBuf<T> {
    fn drop(&mut self) {
        match self.backing {
            Backing::Empty => {}
            // SAFETY: allocated with this layout in `zeroed`, freed once; elements are Copy and need no drop.
            Backing::Heap(layout) => unsafe { dealloc(self.ptr.as_ptr().cast(), layout) },
            Backing::Mapping { base, bytes } => {
                // SAFETY: exactly the mapping made in `map_huge`; nothing refers to it any more.
                let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), bytes) };
            }
        }
    }
}

impl<T> Deref for AlignedBuf<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `ptr` is valid for `len` values, initialised to zero (T is Zeroable).
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for AlignedBuf<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl<T> fmt::Debug for AlignedBuf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuf").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Owner of mapped bytes, for instance a read-only file mapping.
pub type MappedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Read-only values that are either owned or lie inside bytes that `MappedBytes` keeps alive.
pub(crate) enum Store<T> {
    Owned(AlignedBuf<T>),
    Mapped { owner: MappedBytes, offset: usize, len: usize, _values: PhantomData<T> },
}

impl<T: AnyBitPattern + NoUninit> Store<T> {
    /// Values at `offset` bytes into `owner`, or `None` when they do not fit or are not aligned to 64 bytes.
    pub(crate) fn mapped(owner: &MappedBytes, offset: usize, len: usize) -> Option<Store<T>> {
        let bytes: &[u8] = (**owner).as_ref();
        let end = offset.checked_add(len.checked_mul(size_of::<T>())?)?;
        let part = bytes.get(offset..end)?;
        if !part.is_empty() && !(part.as_ptr() as usize).is_multiple_of(ALIGNMENT) {
            return None;
        }
        Some(Store::Mapped { owner: owner.clone(), offset, len, _values: PhantomData })
    }

    pub(crate) fn copied(&self) -> Store<T>
    where
        T: Zeroable,
    {
        let mut copy = AlignedBuf::zeroed(self.len());
        copy.copy_from_slice(self);
        Store::Owned(copy)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

impl<T: AnyBitPattern> Deref for Store<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self {
            Store::Owned(buf) => buf,
            Store::Mapped { owner, offset, len, .. } => {
                let bytes: &[u8] = (**owner).as_ref();
                bytemuck::cast_slice(&bytes[*offset..*offset + *len * size_of::<T>()])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_every_size_are_aligned_and_zero() {
        for len in [0usize, 1, 17, 4096, 600_000, 3_000_001] {
            let mut buf = AlignedBuf::<f32>::zeroed(len);
            assert_eq!(buf.len(), len);
            assert!(buf.iter().all(|&v| v.to_bits() == 0));
            if len > 0 {
                assert!((buf.as_ptr() as usize).is_multiple_of(ALIGNMENT));
                buf[len - 1] = 1.0;
                assert_eq!(buf[len - 1], 1.0);
            }
        }
    }

    #[test]
    fn mapped_values_outside_their_owner_are_refused() {
        let owner: MappedBytes = Arc::new(vec![0u8; 64]);
        assert!(Store::<u8>::mapped(&owner, 32, 40).is_none());
        assert!(Store::<u32>::mapped(&owner, 0, usize::MAX).is_none());
    }
}
