//! What a fetch needs of a cache, and what limits it: the quota, and the reserve of each disk.

use std::collections::BTreeSet;
use std::path::PathBuf;

use hearth_crds::format_bytes;

use crate::directory::Inode;
use crate::room::Item;
use crate::{Cache, Owner};

/// Bytes that are to be written. A disk of parts or of models is one that the cache has besides another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Need {
    /// Bytes that the cache holds afterwards besides what it holds now, which the quota counts.
    pub(crate) quota_bytes: u64,
    /// The most bytes that it holds on the way there besides what it holds now, where everything is on one disk.
    pub(crate) disk_bytes: u64,
    /// Bytes on the disk of the parts; `None` if nothing is written there, and it may be full.
    pub(crate) parts_bytes: Option<u64>,
    /// Bytes on the disk of the models; `None` likewise.
    pub(crate) models_bytes: Option<u64>,
}

impl Need {
    /// Of a part that grows by these bytes.
    pub(crate) fn of_part(bytes: u64) -> Self {
        Self {
            quota_bytes: bytes,
            disk_bytes: bytes,
            parts_bytes: Some(bytes),
            models_bytes: None,
        }
    }

    /// Of these bytes of files that are unpacked from a part.
    pub(crate) fn of_unpacked(bytes: u64) -> Self {
        Self {
            quota_bytes: bytes,
            disk_bytes: bytes,
            parts_bytes: None,
            models_bytes: Some(bytes),
        }
    }

    /// Of a part that is copied to its model: it was counted, and goes at once, but for a while there are both.
    pub(crate) fn of_copy(bytes: u64) -> Self {
        Self {
            quota_bytes: 0,
            ..Self::of_unpacked(bytes)
        }
    }

    /// Of a model's files, which become parts one after another, and then files of the model.
    pub(crate) fn of_files(files: FilesToCome) -> Self {
        let missing_bytes = files.sum_bytes.saturating_sub(files.part_bytes);
        let copy_bytes = match files.are_copied {
            true => files.longest_bytes,
            false => 0,
        };
        Self {
            quota_bytes: missing_bytes,
            disk_bytes: missing_bytes.saturating_add(copy_bytes),
            parts_bytes: Some(files.longest_bytes.saturating_sub(files.part_bytes)),
            models_bytes: Some(files.sum_bytes),
        }
    }

    /// Of both.
    pub(crate) fn and(self, other: Self) -> Self {
        let sum = |one: Option<u64>, other: Option<u64>| match (one, other) {
            (Some(one), Some(other)) => Some(one.saturating_add(other)),
            (one, other) => one.or(other),
        };
        Self {
            quota_bytes: self.quota_bytes.saturating_add(other.quota_bytes),
            disk_bytes: self.disk_bytes.saturating_add(other.disk_bytes),
            parts_bytes: sum(self.parts_bytes, other.parts_bytes),
            models_bytes: sum(self.models_bytes, other.models_bytes),
        }
    }
}

/// Files that are still to come to a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FilesToCome {
    /// Bytes of all of them.
    pub(crate) sum_bytes: u64,
    /// Bytes of the longest.
    pub(crate) longest_bytes: u64,
    /// Bytes that are here as a part.
    pub(crate) part_bytes: u64,
    /// Whether a part is copied to the model ([`Cache::copies_to_models`]).
    pub(crate) are_copied: bool,
}

/// What a limit is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    Quota,
    /// The disk of everything.
    Disk,
    DiskOfModels,
    DiskOfParts,
}

impl Scope {
    /// How much of the item counts against the limit, besides the files that several have and `counted` names already.
    pub(crate) fn bytes_of(self, item: &Item, counted: &mut BTreeSet<Inode>) -> u64 {
        let shared = match self {
            Self::DiskOfParts => None,
            _ => Some(&item.shared),
        };
        let shared = shared.into_iter().flatten();
        let shared = shared.filter(|(inode, _)| counted.insert(**inode));
        let own_bytes = match self {
            Self::Quota | Self::Disk => item.bytes,
            Self::DiskOfModels => item.bytes.saturating_sub(item.part_bytes),
            Self::DiskOfParts => item.part_bytes,
        };
        own_bytes + shared.map(|(_, bytes)| bytes).sum::<u64>()
    }

    /// How much of all items counts against the limit, each file once.
    pub(crate) fn sum_bytes<'a>(self, items: impl IntoIterator<Item = &'a Item>) -> u64 {
        let mut counted = BTreeSet::new();
        let items = items.into_iter();
        items.map(|item| self.bytes_of(item, &mut counted)).sum()
    }

    /// How much of the need counts against the limit; `None` if that does not matter to it.
    pub(crate) fn bytes_needed(self, need: Need) -> Option<u64> {
        match self {
            Self::Quota => Some(need.quota_bytes),
            Self::Disk => Some(need.disk_bytes),
            Self::DiskOfModels => need.models_bytes,
            Self::DiskOfParts => need.parts_bytes,
        }
    }

    /// A directory on the disk.
    pub(crate) fn directory(self, cache: &Cache) -> PathBuf {
        match self {
            Self::DiskOfParts => cache.partial(),
            _ => cache.disk_of_models(),
        }
    }
}

/// The quota or a disk, and what is wanted of it.
#[derive(Clone, Debug)]
pub(crate) struct Limit {
    pub(crate) scope: Scope,
    pub(crate) need_bytes: u64,
    /// Bytes that other running fetches still have to write.
    pub(crate) promised_bytes: u64,
    /// The quota, or what is free on the disk.
    pub(crate) room_bytes: u64,
    /// What is not to be had of it: what the cache holds, or what stays free.
    pub(crate) taken_bytes: u64,
}

impl Limit {
    /// Bytes to remove.
    pub(crate) fn missing_bytes(&self) -> u64 {
        let wanted_bytes = self.need_bytes.saturating_add(self.promised_bytes);
        let wanted_bytes = wanted_bytes.saturating_add(self.taken_bytes);
        wanted_bytes.saturating_sub(self.room_bytes)
    }

    /// What there is.
    pub(crate) fn short(&self, cache: &Cache) -> String {
        let room = format_bytes(self.room_bytes);
        let mut text = match self.scope {
            Scope::Quota => {
                let left_bytes = self.room_bytes.saturating_sub(self.taken_bytes);
                format!("the quota of {room} has {} left", format_bytes(left_bytes))
            }
            _ => format!(
                "the disk of {} has {room} free, of which {} stay free",
                self.scope.directory(cache).display(),
                format_bytes(self.taken_bytes)
            ),
        };
        if self.promised_bytes > 0 {
            text += &format!(
                ", and other downloads still need {}",
                format_bytes(self.promised_bytes)
            );
        }
        text
    }

    pub(crate) fn remedy(&self, owner: &Owner) -> &'static str {
        match (owner, self.scope) {
            (Owner::Node(_), Scope::Quota) => {
                "raise agent.store.quota of Hearth's chart, unpin models, or delete deployments of others"
            }
            (Owner::Node(_), Scope::Disk | Scope::DiskOfModels) => {
                "free space on that disk, unpin models, or delete deployments of others; agent.diskReservePercent of Hearth's chart is what stays free"
            }
            (Owner::Node(_), Scope::DiskOfParts) => {
                "free space on that disk, which has what is being downloaded; agent.diskReservePercent of Hearth's chart is what stays free"
            }
            (Owner::User, Scope::Quota) => {
                "raise HEARTH_MODEL_QUOTA, or remove models: hearth models list, hearth models rm NAME"
            }
            (Owner::User, Scope::Disk | Scope::DiskOfModels) => {
                "free space on that disk, remove models (hearth models list, hearth models rm NAME), or keep them on another disk: HEARTH_CACHE=DIR"
            }
            (Owner::User, Scope::DiskOfParts) => {
                "free space on that disk, which has what is being downloaded, or download to another one: HEARTH_CACHE=DIR"
            }
        }
    }
}

/// The items to remove, least recently used first, and none that frees nothing of what is short.
///
/// # Errors
/// The limit that most is missing of if all goes that may be removed.
pub(crate) fn choose<'a>(
    items: &'a [Item],
    limits: &'a [Limit],
) -> Result<Vec<&'a Item>, &'a Limit> {
    let mut free: Vec<&Item> = items.iter().filter(|item| item.stays.is_none()).collect();
    free.sort_by_key(|item| (item.used, item.key.clone()));
    let missing_bytes = |limit: &Limit, chosen: &[&Item]| {
        let freed_bytes = freed_bytes(limit.scope, chosen, items);
        limit.missing_bytes().saturating_sub(freed_bytes)
    };
    let mut chosen = Vec::new();
    for item in free {
        let helps =
            |limit: &Limit| missing_bytes(limit, &chosen) > 0 && limit.scope.sum_bytes([item]) > 0;
        if limits.iter().any(helps) {
            chosen.push(item);
        }
    }
    let missing = limits.iter().map(|it| (it, missing_bytes(it, &chosen)));
    if let Some((limit, 1..)) = missing.max_by_key(|(_, bytes)| *bytes) {
        return Err(limit);
    }
    // Next to nothing is gained by one whose files another keeps.
    let mut at = 0;
    while let Some(item) = chosen.get(at) {
        let mut others = chosen.clone();
        others.remove(at);
        let suffice = || limits.iter().all(|it| missing_bytes(it, &others) == 0);
        match !item.shared.is_empty() && suffice() {
            true => chosen = others,
            false => at += 1,
        }
    }
    Ok(chosen)
}

/// What no longer counts against a limit once these of all items are gone: a file that several have does as long as one is left.
pub(crate) fn freed_bytes(scope: Scope, gone: &[&Item], items: &[Item]) -> u64 {
    let left = items
        .iter()
        .filter(|item| gone.iter().all(|it| it.key != item.key));
    scope.sum_bytes(items) - scope.sum_bytes(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_takes_room_on_its_disk_and_nothing_of_the_quota() {
        let needs = |scope: Scope, need: Need| scope.bytes_needed(need);
        let copy = Need::of_copy(7);
        assert_eq!(needs(Scope::Quota, copy), Some(0));
        assert_eq!(needs(Scope::Disk, copy), Some(7));
        assert_eq!(needs(Scope::DiskOfModels, copy), Some(7));
        assert_eq!(needs(Scope::DiskOfParts, copy), None);
        for (are_copied, disk_bytes) in [(false, 90), (true, 130)] {
            let files = Need::of_files(FilesToCome {
                sum_bytes: 100,
                longest_bytes: 40,
                part_bytes: 10,
                are_copied,
            });
            assert_eq!(needs(Scope::Quota, files), Some(90));
            assert_eq!(needs(Scope::Disk, files), Some(disk_bytes));
            assert_eq!(needs(Scope::DiskOfModels, files), Some(100));
            assert_eq!(needs(Scope::DiskOfParts, files), Some(30));
        }
    }
}
