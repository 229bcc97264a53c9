//! Objects of one kind by key and by owner, each in the newest state seen.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use hearth_controller_core::key::Key;

/// Number of remembered uids of objects that are gone and may still be reported.
const REMEMBERED_ENDS: usize = 4096;

/// Objects of one kind.
#[derive(Debug)]
pub(crate) struct Table<T> {
    rows: HashMap<Key, Row<T>>,
    /// Sorted keys: an owner has only a few, and a short vector is small.
    by_owner: HashMap<Arc<str>, Vec<Key>>,
    ended: HashSet<Arc<str>>,
    ended_order: VecDeque<Arc<str>>,
}

/// One object.
#[derive(Debug)]
pub(crate) struct Row<T> {
    /// The object's uid.
    pub(crate) uid: Arc<str>,
    /// The uid of its controller; empty if there is none.
    pub(crate) owner: Arc<str>,
    /// Its resource version.
    pub(crate) version: u64,
    /// The object itself.
    pub(crate) value: Arc<T>,
}

/// Fields that identify an object and its state.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) key: Key,
    pub(crate) uid: Arc<str>,
    pub(crate) owner: Arc<str>,
    pub(crate) version: u64,
}

impl Identity {
    /// Reads the identity from an object's metadata.
    pub(crate) fn of(meta: &kube::api::ObjectMeta) -> Self {
        let text = |text: &Option<String>| text.as_deref().unwrap_or_default().to_owned();
        Self {
            key: Key::new(&text(&meta.namespace), &text(&meta.name)),
            uid: text(&meta.uid).into(),
            owner: crate::cluster::lean::owner(meta).into(),
            version: crate::cluster::lean::version(meta),
        }
    }
}

impl Identity {
    /// Shares the strings of the deployment that owns the object: thousands of objects name few deployments.
    pub(crate) fn share(&mut self, deployments: &HashMap<Arc<str>, Key>) {
        let Some((uid, deployment)) = deployments.get_key_value(&self.owner) else {
            return;
        };
        self.owner = Arc::clone(uid);
        if self.key.namespace == deployment.namespace {
            self.key.namespace = Arc::clone(&deployment.namespace);
        }
    }
}

/// Outcome of storing a state.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Put<T> {
    /// The state is older than the stored one, or its object has ended.
    Stale,
    /// Nothing but the version changed, if that.
    Same,
    /// The state is new or different; holds the previous state, if any.
    Changed(Option<Arc<T>>),
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self {
            rows: HashMap::new(),
            by_owner: HashMap::new(),
            ended: HashSet::new(),
            ended_order: VecDeque::new(),
        }
    }
}

impl<T: PartialEq> Table<T> {
    /// Stores a state, unless a newer one is present.
    pub(crate) fn put(&mut self, identity: Identity, value: T) -> Put<T> {
        if self.ended.contains(&identity.uid) {
            return Put::Stale;
        }
        let Identity {
            key,
            uid,
            owner,
            version,
        } = identity;
        let before = match self.rows.get_mut(&key) {
            Some(row) if row.uid == uid => {
                if version < row.version {
                    return Put::Stale;
                }
                // One state, however it is read: while a rollback has brought an older definition and not yet the older operator, the
                // API server leaves out fields that it still stores. Versions that are no numbers, 0 here, say nothing.
                if version == row.version && version > 0 {
                    return Put::Same;
                }
                row.version = version;
                if *row.value == value && row.owner == owner {
                    return Put::Same;
                }
                self.take(&key)
            }
            // Another object of the same name: versions are comparable nevertheless.
            Some(row) if version < row.version => return Put::Stale,
            Some(_) => {
                let row = self.take(&key);
                self.remember_end(row.as_ref().map(|row| Arc::clone(&row.uid)));
                row
            }
            None => None,
        };
        let keys = self.by_owner.entry(Arc::clone(&owner)).or_default();
        if let Err(place) = keys.binary_search(&key) {
            keys.reserve_exact(1);
            keys.insert(place, key.clone());
        }
        let row = Row {
            uid,
            owner,
            version,
            value: Arc::new(value),
        };
        self.rows.insert(key, row);
        Put::Changed(before.map(|row| row.value))
    }

    /// Removes an object that has ended: it is not accepted again. With an empty `uid`, whichever object has that name
    /// is removed for now, as when a list does not include it, since the list may be older than the object.
    pub(crate) fn remove(&mut self, key: &Key, uid: &str) -> Option<Row<T>> {
        let row = self.rows.get(key)?;
        if !uid.is_empty() && &*row.uid != uid {
            return None;
        }
        let row = self.take(key);
        if !uid.is_empty() {
            self.remember_end(row.as_ref().map(|row| Arc::clone(&row.uid)));
        }
        row
    }

    fn take(&mut self, key: &Key) -> Option<Row<T>> {
        let row = self.rows.remove(key)?;
        if let Some(keys) = self.by_owner.get_mut(&row.owner) {
            keys.retain(|other| other != key);
            if keys.is_empty() {
                self.by_owner.remove(&row.owner);
            }
        }
        Some(row)
    }

    fn remember_end(&mut self, uid: Option<Arc<str>>) {
        let Some(uid) = uid.filter(|uid| !uid.is_empty()) else {
            return;
        };
        if self.ended.insert(Arc::clone(&uid)) {
            self.ended_order.push_back(uid);
        }
        if self.ended_order.len() > REMEMBERED_ENDS
            && let Some(oldest) = self.ended_order.pop_front()
        {
            self.ended.remove(&oldest);
        }
    }
}

impl<T> Table<T> {
    /// Returns the object of that name.
    pub(crate) fn get(&self, key: &Key) -> Option<&Row<T>> {
        self.rows.get(key)
    }

    /// Returns the owner of the object of that name.
    pub(crate) fn owner(&self, key: &Key) -> Option<Arc<str>> {
        self.rows.get(key).map(|row| Arc::clone(&row.owner))
    }

    /// The objects of an owner, ordered by name; objects without a controller belong to the empty owner.
    pub(crate) fn of(&self, owner: &str) -> impl Iterator<Item = (&Key, &Row<T>)> {
        let keys = self.by_owner.get(owner).into_iter().flatten();
        keys.filter_map(|key| self.rows.get(key).map(|row| (key, row)))
    }

    /// All keys, in arbitrary order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &Key> {
        self.rows.keys()
    }

    /// All objects, in arbitrary order.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&Key, &Row<T>)> {
        self.rows.iter()
    }

    /// Number of objects.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str, uid: &str, version: u64) -> Identity {
        Identity {
            key: Key::new("default", name),
            uid: uid.into(),
            owner: "owner".into(),
            version,
        }
    }

    #[test]
    fn an_older_state_never_replaces_a_newer_one() {
        let mut table = Table::default();
        assert_eq!(table.put(id("a", "1", 5), "new"), Put::Changed(None));
        assert_eq!(table.put(id("a", "1", 4), "old"), Put::Stale);
        assert_eq!(table.put(id("a", "1", 6), "new"), Put::Same);
        assert_eq!(
            table.put(id("a", "1", 7), "newer"),
            Put::Changed(Some("new".into()))
        );
    }

    #[test]
    fn a_state_of_which_less_is_read_replaces_nothing() {
        let mut table = Table::default();
        table.put(id("a", "1", 5), "all fields");
        assert_eq!(table.put(id("a", "1", 5), "a few"), Put::Same);
        let row = table.get(&Key::new("default", "a")).expect("the row");
        assert_eq!(*row.value, "all fields");
    }

    #[test]
    fn what_has_ended_does_not_come_back() {
        let mut table = Table::default();
        table.put(id("a", "1", 5), "x");
        assert!(table.remove(&Key::new("default", "a"), "other").is_none());
        assert!(table.remove(&Key::new("default", "a"), "1").is_some());
        assert_eq!(table.put(id("a", "1", 6), "ghost"), Put::Stale);
        assert_eq!(table.put(id("a", "2", 9), "next"), Put::Changed(None));
        assert_eq!(table.of("owner").count(), 1);
    }

    #[test]
    fn what_a_list_did_not_name_may_come_back() {
        let mut table = Table::default();
        table.put(id("a", "1", 5), "x");
        assert!(table.remove(&Key::new("default", "a"), "").is_some());
        assert_eq!((table.len(), table.of("owner").count()), (0, 0));
        assert_eq!(table.put(id("a", "1", 5), "x"), Put::Changed(None));
    }
}
