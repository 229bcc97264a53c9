//! Decision whether a node's profile is rewritten: pure.

use hearth_crds::NodeProfileStatus;

/// Returns the profile to be written for a node, if any. `held_bytes` is the memory requested by Hearth's Pods on it.
///
/// `memory.availableBytes` is the total that Hearth may use. A node reports what a new program can have; how much of
/// their requests Hearth's Pods have already taken is unknown, since weights are page cache and a KV cache fills up
/// slowly. So the memory that Hearth may use lies between the two sums, with and without the Pods, and the written
/// value stays unless it is outside of them by more than a tenth of the memory: a profile is not a clock, and each
/// change to it causes every deployment to be replanned.
pub(super) fn due_profile(
    stored: Option<&NodeProfileStatus>,
    mut measured: NodeProfileStatus,
    held_bytes: u64,
) -> Option<NodeProfileStatus> {
    let total = measured.memory.total_bytes;
    let least = measured.memory.available_bytes;
    let most = least.saturating_add(held_bytes).min(total.max(least));
    let Some(stored) = stored else {
        measured.memory.available_bytes = most;
        return Some(measured);
    };
    let (before, slack) = (stored.memory.available_bytes, total / 10);
    let available = if before.saturating_add(slack) < least {
        least
    } else if before > most.saturating_add(slack) {
        most
    } else {
        before
    };
    if available == before && hardware(stored.clone()) == hardware(measured.clone()) {
        return None;
    }
    measured.memory.available_bytes = available;
    Some(measured)
}

/// The profile without values that change from minute to minute.
fn hardware(mut profile: NodeProfileStatus) -> NodeProfileStatus {
    profile.memory.available_bytes = 0;
    profile.measured_at = String::new();
    for numa in &mut profile.numa_nodes {
        numa.free_bytes = 0;
    }
    for gpu in &mut profile.gpus {
        gpu.free_bytes = 0;
        if let Some(link) = &mut gpu.pcie {
            // An idle GPU downgrades its link.
            (link.generation, link.width) = (0, 0);
        }
    }
    for disk in &mut profile.disks {
        disk.free_bytes = 0;
    }
    profile
}

#[cfg(test)]
mod tests {
    use hearth_crds::{CpuProfile, GpuProfile, MemoryProfile, NumaNodeProfile, PcieLink};

    use super::*;

    fn profile(available_bytes: u64) -> NodeProfileStatus {
        NodeProfileStatus {
            node: "a".to_owned(),
            cpus: vec![CpuProfile::default()],
            numa_nodes: vec![NumaNodeProfile {
                free_bytes: available_bytes,
                ..NumaNodeProfile::default()
            }],
            memory: MemoryProfile {
                total_bytes: 1000,
                available_bytes,
                ..MemoryProfile::default()
            },
            measured_at: available_bytes.to_string(),
            ..NodeProfileStatus::default()
        }
    }

    /// Name, stored, measured and held bytes, and the value written.
    type Case = (&'static str, Option<u64>, u64, u64, Option<u64>);

    const CASES: [Case; 11] = [
        ("the first time", None, 800, 0, Some(800)),
        ("the first time, with Pods there", None, 500, 200, Some(700)),
        ("never more than there is", None, 900, 500, Some(1000)),
        ("unchanged", Some(800), 800, 0, None),
        ("a little more", Some(800), 900, 0, None),
        ("much more", Some(800), 901, 0, Some(901)),
        ("a little less", Some(800), 700, 0, None),
        ("much less", Some(800), 699, 0, Some(699)),
        ("less by what our Pods took", Some(800), 300, 500, None),
        ("our Pods map page cache", Some(800), 790, 500, None),
        (
            "others took it beside our Pods",
            Some(800),
            100,
            500,
            Some(600),
        ),
    ];

    #[test]
    fn only_what_moved_is_written() {
        for (what, stored, measured, held, written) in CASES {
            let stored = stored.map(profile);
            let due = due_profile(stored.as_ref(), profile(measured), held);
            let available = due.as_ref().map(|due| due.memory.available_bytes);
            assert_eq!(available, written, "{what}");
            // A profile that was just written is not written again.
            if let Some(due) = due {
                assert_eq!(
                    due_profile(Some(&due), profile(measured), held),
                    None,
                    "{what}"
                );
            }
        }
    }

    #[test]
    fn new_hardware_is_written_at_once_with_the_memory_as_it_was() {
        let stored = profile(800);
        let mut measured = profile(790);
        measured.cpus.push(CpuProfile {
            id: 1,
            ..CpuProfile::default()
        });
        let due = due_profile(Some(&stored), measured, 0).expect("due");
        assert_eq!((due.cpus.len(), due.memory.available_bytes), (2, 800));
    }

    #[test]
    fn a_gpu_that_idles_or_fills_is_the_same_gpu() {
        let with_gpu = |free_bytes, generation| {
            let link = PcieLink {
                generation,
                width: 16,
                max_generation: 4,
                max_width: 16,
            };
            let gpu = GpuProfile {
                uuid: "GPU-1".to_owned(),
                memory_bytes: 1000,
                free_bytes,
                pcie: Some(link),
                ..GpuProfile::default()
            };
            NodeProfileStatus {
                gpus: vec![gpu],
                ..profile(800)
            }
        };
        let stored = with_gpu(900, 4);
        assert_eq!(due_profile(Some(&stored), with_gpu(10, 1), 0), None);
        let mut another = with_gpu(900, 4);
        another.gpus[0].memory_bytes = 2000;
        assert!(due_profile(Some(&stored), another, 0).is_some());
        assert!(due_profile(Some(&profile(800)), stored, 0).is_some());
    }
}
