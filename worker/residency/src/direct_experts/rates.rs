//! How fast experts that are not in memory come by the page cache, and past it.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use hearth_formats::Checkpoint;
use hearth_kernels::Backend;
use hearth_model::{ModuleSpec, ResidencyError};
use rustix::fs::{Advice, fadvise};

use super::buffers::{ALIGN_BYTES, Buffer};
use super::{Expert, READERS, open_directly, read_piece};
use crate::pages;

/// Bytes that are read to measure both ways, unless the fewest groups have more.
const SAMPLE_BYTES: u64 = 256 << 20;
/// Rounds of a group of experts by each way, at least.
const LEAST_ROUNDS: u64 = 2;

/// Rates of reads of experts, in GB/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadRates {
    /// Past the page cache, several at a time.
    pub direct_gbps: f64,
    /// By the page cache, which is asked for several at a time.
    pub cached_gbps: f64,
}

/// Measures both ways on groups of experts by turns, spread over all of them; takes as long as the disk for 256 MiB or 16 experts, whichever
/// is more. Pages
/// that other processes have mapped stay, and count as those that the page cache keeps.
///
/// # Errors
/// [`ResidencyError::Format`]; [`ResidencyError::System`] if the files cannot be read directly.
pub fn read_rates<B: Backend>(
    checkpoint: &Checkpoint,
    modules: &[ModuleSpec],
    backend: &B,
) -> Result<ReadRates, ResidencyError> {
    let failed = |source| ResidencyError::System {
        what: "measure reads past the page cache".to_owned(),
        source,
        remedy: "check the disk and the files.",
    };
    let files = checkpoint.files().iter();
    let files = files.map(|file| open_directly(&file.path));
    let files = files.collect::<io::Result<Vec<File>>>().map_err(failed)?;
    let mut took = [Duration::ZERO; 2];
    let mut read = [0; 2];
    for (n, group) in sample(checkpoint, modules).into_iter().enumerate() {
        let experts = group
            .iter()
            .map(|spec| Expert::new(spec, checkpoint, backend));
        let experts = experts.collect::<Result<Vec<Expert<B>>, _>>()?;
        let time = match n % 2 {
            0 => direct(&files, &experts),
            _ => cached(&files, &experts, (group.as_slice(), checkpoint)),
        };
        took[n % 2] += time.map_err(failed)?;
        read[n % 2] += experts.iter().map(|expert| expert.bytes).sum::<u64>();
    }
    let gbps = |way: usize| read[way] as f64 / 1e9 / took[way].as_secs_f64().max(1e-9);
    Ok(ReadRates {
        direct_gbps: gbps(0),
        cached_gbps: gbps(1),
    })
}

/// Groups of experts, an even number, that are spread over all.
fn sample<'m>(checkpoint: &Checkpoint, modules: &'m [ModuleSpec]) -> Vec<Vec<&'m ModuleSpec>> {
    let expert_bytes = modules.first().map_or(1, |m| m.stored_bytes(checkpoint));
    let rounds = SAMPLE_BYTES / (2 * READERS as u64 * expert_bytes.max(1));
    let wanted = 2 * READERS * rounds.max(LEAST_ROUNDS) as usize;
    let step = (modules.len() / wanted).max(1);
    let spread: Vec<&ModuleSpec> = modules.iter().step_by(step).take(wanted).collect();
    let mut groups: Vec<Vec<&ModuleSpec>> = spread.chunks(READERS).map(<[_]>::to_vec).collect();
    groups.truncate(groups.len() / 2 * 2);
    groups
}

fn direct<B: Backend>(files: &[File], experts: &[Expert<B>]) -> io::Result<Duration> {
    // Written once when they are made, as those that are used again.
    let buffers = experts
        .iter()
        .map(|expert| Buffer::new(expert.buffer_bytes() + ALIGN_BYTES));
    let mut buffers = buffers.collect::<io::Result<Vec<Buffer>>>()?;
    let began = Instant::now();
    std::thread::scope(|scope| {
        let readers: Vec<_> = experts
            .iter()
            .zip(&mut buffers)
            .map(|(expert, buffer)| {
                scope.spawn(|| {
                    expert.pieces.iter().try_for_each(|piece| {
                        let room = &mut buffer.bytes_mut()[piece.at..piece.at + piece.len];
                        read_piece(&files[piece.file], piece, room)
                    })
                })
            })
            .collect();
        readers.into_iter().try_for_each(|reader| {
            let ended = reader.join();
            ended.unwrap_or_else(|_| Err(io::Error::other("a reader ended early")))
        })
    })?;
    Ok(began.elapsed())
}

fn cached<B: Backend>(
    files: &[File],
    experts: &[Expert<B>],
    (group, checkpoint): (&[&ModuleSpec], &Checkpoint),
) -> io::Result<Duration> {
    for piece in experts.iter().flat_map(|expert| &expert.pieces) {
        let len = NonZeroU64::new(piece.len as u64);
        fadvise(&files[piece.file], piece.offset, len, Advice::DontNeed)?;
    }
    let regions = group
        .iter()
        .flat_map(|spec| pages::regions(spec, checkpoint));
    let regions: Vec<_> = regions.collect();
    let advice_bytes = pages::advice_bytes(checkpoint);
    let began = Instant::now();
    for region in &regions {
        pages::will_need(region, advice_bytes, || true);
    }
    for region in &regions {
        pages::populate(region)?;
    }
    Ok(began.elapsed())
}
