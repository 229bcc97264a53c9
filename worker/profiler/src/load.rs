//! Load from other programs during a measurement.

use crate::tree::Tree;

/// Percentage below which a machine counts as quiet.
const QUIET_PERCENT: u64 = 10;

/// Ticks since the machine started.
pub(crate) struct Load {
    /// CPU time of all CPUs.
    all: u64,
    /// Time in which CPUs were idle.
    idle: u64,
    /// Time of this process, on all CPUs.
    own: u64,
}

impl Load {
    /// Reads the current counters; `None` if the kernel does not report them.
    pub(crate) fn now(tree: &Tree) -> Option<Self> {
        let stat = tree.read("/proc/stat")?;
        // user nice system idle iowait irq softirq steal; user already includes guests.
        let ticks: Vec<u64> = stat
            .lines()
            .find_map(|line| line.strip_prefix("cpu "))?
            .split_whitespace()
            .take(8)
            .map_while(|field| field.parse().ok())
            .collect();
        let own = tree.read("/proc/self/stat").unwrap_or_default();
        // The name in parentheses may contain anything; utime and stime are the 12th and 13th fields after it.
        let own = own.rsplit_once(')').map_or("", |(_, fields)| fields);
        let own = own
            .split_whitespace()
            .skip(11)
            .take(2)
            .filter_map(|field| field.parse::<u64>().ok())
            .sum();
        Some(Self {
            all: ticks.iter().sum(),
            idle: ticks.get(3)? + ticks.get(4)?,
            own,
        })
    }

    /// Share of CPU time used by other programs since then, in percent; `None` if the machine was quiet.
    pub(crate) fn others_percent(&self, tree: &Tree) -> Option<u32> {
        let now = Self::now(tree)?;
        let all = now.all.saturating_sub(self.all);
        let used = all.saturating_sub(now.idle.saturating_sub(self.idle));
        let others = used.saturating_sub(now.own.saturating_sub(self.own));
        let percent = (others * 100).checked_div(all)?;
        (percent >= QUIET_PERCENT).then(|| u32::try_from(percent.min(100)).unwrap_or(100))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(cpu: &str, own: &str) -> Tree {
        let root = tempfile::tempdir().unwrap().keep();
        std::fs::create_dir_all(root.join("proc/self")).unwrap();
        std::fs::write(root.join("proc/stat"), format!("cpu  {cpu}\ncpu0 1 2 3\n")).unwrap();
        let stat = format!("7 (a (name) 1 2) R 1 1 1 0 -1 0 0 0 0 0 {own} 0 0");
        std::fs::write(root.join("proc/self/stat"), stat).unwrap();
        Tree::new(&root)
    }

    #[test]
    fn what_others_had_is_what_was_neither_idle_nor_our_own() {
        let before = Load::now(&at("100 0 100 1000 0 0 0 0 0 0", "50 10")).unwrap();
        // 200 ticks: 40 idle, 100 our own, 60 from others.
        let busy = at("230 0 120 1030 10 0 0 10 0 0", "140 20");
        assert_eq!(before.others_percent(&busy), Some(30));
        let quiet = at("200 0 110 1190 0 0 0 0 0 0", "140 20");
        assert_eq!(before.others_percent(&quiet), None);
    }

    #[test]
    fn a_clock_that_stands_tells_nothing() {
        let tree = at("100 0 100 1000 0 0 0 0 0 0", "50 10");
        assert_eq!(Load::now(&tree).unwrap().others_percent(&tree), None);
        let empty = Tree::new(tempfile::tempdir().unwrap().path());
        assert!(Load::now(&empty).is_none());
    }
}
