//! Regions of mapped files that the GPU reads directly.
//!
//! Registering pages with the driver takes longer than copying a small tensor from them, and consecutive tensors share
//! pages. A whole region of the file around a tensor is therefore registered at once and kept for those that follow. A
//! region is identified by its mapping: memory that was unmapped and mapped again is a different one.

use std::ffi::c_void;
use std::fs;
use std::ops::Range;

use cudarc::driver::sys::{self, CUresult};
use hearth_kernels::KernelError;

use crate::driver::check;

/// Size of a region in bytes; a longer tensor has its own.
const REGION_BYTES: usize = 64 << 20;
/// Number of regions registered at a time while weights are loaded: their pages cannot leave memory.
const KEPT: usize = 2;

/// Registered regions, the latest last.
#[derive(Default)]
pub(super) struct RegisteredRegions {
    registered: Vec<RegisteredRegion>,
}

struct RegisteredRegion {
    range: Range<usize>,
    mapping: Mapping,
}

/// A line of `/proc/self/maps`: a mapped file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapping {
    range: Range<usize>,
    /// Offset, device and inode, as written there.
    file: String,
}

impl RegisteredRegions {
    pub(super) fn is_empty(&self) -> bool {
        self.registered.is_empty()
    }

    /// Releases all pages. A context must be current, and every copy done.
    pub(super) fn clear(&mut self) {
        self.registered.clear();
    }

    /// Checks whether the GPU can read `host` directly, after registering the pages needed. `Err(Some(…))` is the
    /// driver's refusal; `Err(None)`: the bytes belong to no mapped file, so registering them is not worthwhile.
    pub(super) fn cover(
        &mut self,
        host: &[u8],
    ) -> Result<Result<(), Option<CUresult>>, KernelError> {
        let wanted = host.as_ptr() as usize..host.as_ptr() as usize + host.len();
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let Some(mapping) = mapping_of(&maps, &wanted) else {
            return Ok(Err(None));
        };
        let covers = |w: &RegisteredRegion| {
            w.mapping == mapping && w.range.start <= wanted.start && wanted.end <= w.range.end
        };
        if self.registered.iter().any(covers) {
            return Ok(Ok(()));
        }
        let range = region(&mapping.range, &wanted);
        let meets = |w: &RegisteredRegion| w.range.start < range.end && range.start < w.range.end;
        self.registered.retain(|w| !meets(w));
        if self.registered.len() >= KEPT {
            self.registered.remove(0);
        }
        let flags = sys::CU_MEMHOSTREGISTER_READ_ONLY;
        // SAFETY: the range lies in one mapping of a file, which lives as long as `host` is borrowed; a region whose
        // mapping is gone is never read again, since it is compared with the current mappings.
        let result =
            unsafe { sys::cuMemHostRegister_v2(range.start as *mut c_void, range.len(), flags) };
        match result {
            CUresult::CUDA_SUCCESS => {
                self.registered.push(RegisteredRegion { range, mapping });
                Ok(Ok(()))
            }
            CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
            | CUresult::CUDA_ERROR_NOT_SUPPORTED
            | CUresult::CUDA_ERROR_INVALID_VALUE
            | CUresult::CUDA_ERROR_OPERATING_SYSTEM
            | CUresult::CUDA_ERROR_NOT_PERMITTED
            | CUresult::CUDA_ERROR_OUT_OF_MEMORY => Ok(Err(Some(result))),
            other => check("cuMemHostRegister", other).map(|()| Err(None)),
        }
    }
}

impl Drop for RegisteredRegion {
    fn drop(&mut self) {
        // SAFETY: registered by `cover`, and every copy is awaited before another call.
        unsafe { sys::cuMemHostUnregister(self.range.start as *mut c_void) };
    }
}

/// Returns the region of a mapping around some of its bytes.
fn region(mapping: &Range<usize>, wanted: &Range<usize>) -> Range<usize> {
    let page = rustix::param::page_size();
    let start = (wanted.start / page * page).max(mapping.start);
    let end = wanted.end.next_multiple_of(page).max(start + REGION_BYTES);
    start..end.min(mapping.end)
}

/// Finds the mapped file that contains all of `wanted`.
fn mapping_of(maps: &str, wanted: &Range<usize>) -> Option<Mapping> {
    maps.lines().find_map(|line| {
        let (addresses, rest) = line.split_once(' ')?;
        let (start, end) = addresses.split_once('-')?;
        let start = usize::from_str_radix(start, 16).ok()?;
        let end = usize::from_str_radix(end, 16).ok()?;
        // Permissions, offset, device, inode, and the path.
        let mut words = rest.split_whitespace().skip(1);
        let (offset, device, inode) = (words.next()?, words.next()?, words.next()?);
        let holds = start <= wanted.start && wanted.end <= end;
        (holds && inode != "0").then(|| Mapping {
            range: start..end,
            file: format!("{offset} {device} {inode}"),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
        55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]\n\
        7f0000000000-7f0010000000 r--s 00001000 fd:00 4711                       /models/a file.safetensors\n";

    #[test]
    fn only_mapped_files_are_windows() {
        let file = mapping_of(MAPS, &(0x7f00_0000_1000..0x7f00_0000_2000)).unwrap();
        assert_eq!(file.range, 0x7f00_0000_0000..0x7f00_1000_0000);
        assert_eq!(file.file, "00001000 fd:00 4711");
        assert_eq!(
            mapping_of(MAPS, &(0x55d0_c000_0000..0x55d0_c000_0010)),
            None
        );
        assert_eq!(
            mapping_of(MAPS, &(0x7f00_0fff_f000..0x7f00_1000_0001)),
            None
        );
    }

    #[test]
    fn a_stretch_holds_what_is_wanted_and_stays_in_the_mapping() {
        let mapping = 0x7f00_0000_0000..0x7f00_1000_0000;
        let near_end = 0x7f00_0fff_0123..0x7f00_0fff_8000;
        assert_eq!(
            region(&mapping, &near_end),
            0x7f00_0fff_0000..0x7f00_1000_0000
        );
        let long = 0x7f00_0000_1000..0x7f00_0800_0001;
        let got = region(&mapping, &long);
        assert!(got.start <= long.start && got.end >= long.end && got.end <= mapping.end);
        assert_eq!(
            region(&mapping, &(0x7f00_0000_1000..0x7f00_0000_1010)).len(),
            REGION_BYTES
        );
    }
}
