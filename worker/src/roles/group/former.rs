//! The head's side of a group: asks members to join, again after each loss.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hearth_parallel::{Attendance, Formed, Former, Group, GroupError, Wanted};
use hearth_transport::{Clients, v1};
use tokio::runtime::Handle;
use tonic::{Code, Status};

use super::addresses::Addresses;
use super::judge::{Slow, Told, judge};
use super::link::{BEAT_PERIOD, SILENCE};
use super::membership::{EPOCH, Membership};
use super::net::{Member, NetGroup};
use super::terms::{VERSION, version};

/// Time before members that do not answer are asked again.
const RETRY_PERIOD: Duration = Duration::from_millis(100);
/// Time between two looks at where members are that have not answered.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// Why members are left out of a group that does without them.
const NO_ADDRESS: &str = "it has no address yet";
const PAUSED: &str = "it was lost again soon after it had come back";
const SPARE: &str = "it is there, and with it they would be too many for the same bits";
const OWN_SHARE: &str = "it is there, and has its own share of the experts alone";
/// Time between two lines of the log on a member that is missing.
const SAY_PERIOD: Duration = Duration::from_secs(30);

/// Forms groups of processes.
pub(super) struct NetFormer {
    /// Names and nodes of the members by place.
    names: Vec<(String, String)>,
    addresses: Addresses,
    /// What all of them must agree to.
    join: v1::Join,
    clients: Clients,
    membership: Membership,
    /// Least time that a member has for a part of a pass as it has computed before.
    patience: Duration,
    runtime: Handle,
    /// Number of the group that was formed last, or a later one that a member knows.
    last_epoch: AtomicU64,
    /// Since when a member has been missing, and when that was said last.
    missing: Mutex<Option<(Instant, Instant)>>,
    standing: Mutex<Standing>,
}

/// Who is together now, and who may be next.
struct Standing {
    attendance: Attendance,
    /// The group that was formed last, with the places of its ranks, unless it is known to be lost.
    current: Option<(Arc<NetGroup>, Vec<usize>)>,
    /// Least time for all members to answer: longer once some have not within the time before.
    patience: Duration,
}

impl Standing {
    /// Places of those who are together; none where the group is lost, which is noted once.
    fn together(&mut self, now: Instant) -> Vec<usize> {
        if let Some((group, places)) = &self.current {
            if group.lost().is_none() {
                return places.clone();
            }
            self.current = None;
            self.attendance.lost(now);
        }
        Vec::new()
    }
}

/// Why members are not there, by place.
type Absent = BTreeMap<usize, String>;

/// Members that are asked to join one epoch.
struct Call {
    group: Arc<NetGroup>,
    /// As each member is told of all.
    told: Vec<v1::Member>,
    /// Place in the plan of each rank.
    places: Vec<usize>,
    /// What those said of themselves that have joined, by rank.
    joined: BTreeMap<usize, v1::Joined>,
    /// Why others have not.
    absent: Absent,
    /// A member that does not fit.
    unfit: Option<GroupError>,
}

impl Call {
    /// Places of all who have come, the head among them.
    fn there(&self) -> Vec<usize> {
        let ranks = std::iter::once(&0).chain(self.joined.keys());
        ranks.map(|rank| self.places[*rank]).collect()
    }
}

impl NetFormer {
    /// What forms groups of members with these names and nodes, the first of which is this one's; `stand_ins` says of each whether it
    /// can do its part among fewer. A member that takes longer than `patience` for what it has computed before, and far longer than
    /// ever, is lost. Must be called within a runtime.
    pub(super) fn new(
        (names, addresses): (Vec<(String, String)>, Addresses),
        stand_ins: Vec<bool>,
        join: v1::Join,
        (clients, patience): (Clients, Duration),
        membership: Membership,
    ) -> Self {
        Self {
            names,
            addresses,
            join,
            clients,
            membership,
            patience,
            runtime: Handle::current(),
            last_epoch: AtomicU64::new(0),
            missing: Mutex::default(),
            standing: Mutex::new(Standing {
                attendance: Attendance::new(stand_ins),
                current: None,
                patience: Duration::ZERO,
            }),
        }
    }

    /// Says which member is missing and why, at first quietly: most are back within a moment.
    fn miss(&self, place: usize, why: &str) {
        let member = self.name(place);
        self.membership
            .set_missing(Some(self.names[place].0.clone()));
        tracing::debug!(member, why, "not there yet");
        let now = Instant::now();
        let mut missing = lock(&self.missing);
        let (since, said) = missing.get_or_insert((now, now));
        if now.duration_since(*said) >= SAY_PERIOD {
            *said = now;
            let seconds = now.duration_since(*since).as_secs();
            tracing::warn!(member, why, seconds, "the group is waiting for a member");
        }
    }

    /// A number that is greater than those of groups before, also of another process of this head. Where the clock went back,
    /// members say which one they know.
    fn next_epoch(&self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now_ms = now.map_or(0, |since| since.as_millis() as u64);
        let epoch = now_ms.max(self.last_epoch.load(Ordering::Relaxed).saturating_add(1));
        self.last_epoch.store(epoch, Ordering::Relaxed);
        epoch
    }

    /// Where the members are, by place; of whom that is not known, why.
    fn members(&self) -> BTreeMap<usize, Result<Member, String>> {
        let found = self.addresses.of(&self.names);
        let places = 0..self.names.len();
        match found {
            Ok(members) => {
                let none = |_| NO_ADDRESS.to_owned();
                let members = members.into_iter().map(|member| member.map_err(none));
                places.zip(members).collect()
            }
            Err(error) => {
                let why = format!("{error:#}");
                places.map(|place| (place, Err(why.clone()))).collect()
            }
        }
    }

    /// A name and node in messages to people.
    fn name(&self, place: usize) -> String {
        let (name, node) = &self.names[place];
        match node.is_empty() {
            true => name.clone(),
            false => format!("{name} on {node}"),
        }
    }

    /// A new epoch of these members, of whom nobody has been asked yet. Must be called within the runtime.
    fn epoch_of(&self, members: Vec<(usize, Member)>) -> Call {
        let (places, members): (Vec<usize>, Vec<Member>) = members.into_iter().unzip();
        let told = members.iter().map(Member::told).collect();
        let group = NetGroup::new(
            self.next_epoch(),
            0,
            members,
            self.join.waiting_bytes as usize,
            self.clients.clone(),
        );
        Call {
            group: Arc::new(group),
            told,
            places,
            joined: BTreeMap::new(),
            absent: Absent::new(),
            unfit: None,
        }
    }

    /// Makes an epoch the head's own; returns whether it is later than those that the head knows.
    fn enter(&self, call: &Call) -> bool {
        let entered = self.membership.enter(&call.group);
        if let Err(known) = entered {
            self.last_epoch.fetch_max(known, Ordering::Relaxed);
        }
        entered.is_ok()
    }

    /// Asks some members of an epoch to join, until all have answered; where `all_or_none`, until one does not join.
    fn invite(
        &self,
        call: &mut Call,
        ranks: Vec<usize>,
        deadline: Instant,
        (wanted, all_or_none): (&Wanted<'_>, bool),
    ) -> Result<(), GroupError> {
        let (sender, answers) = channel();
        for rank in &ranks {
            let join = v1::Join {
                rank: *rank as u32,
                members: call.told.clone(),
                ..self.join.clone()
            };
            let (sender, rank) = (sender.clone(), *rank);
            // After the last answer nobody listens.
            let heard = move |answer| drop(sender.send((rank, answer)));
            let invited = call.group.invite(rank, join, heard);
            invited.inspect_err(|_| call.group.leave())?;
        }
        if self.membership.head_drains() {
            call.group.say_draining();
        }
        drop(sender);
        let mut silent = ranks;
        let is_in_vain = |call: &Call| all_or_none && !call.absent.is_empty();
        while !silent.is_empty() && !is_in_vain(call) {
            let left = deadline.saturating_duration_since(Instant::now());
            let (rank, answer) = match answers.recv_timeout(left.min(LOOK_PERIOD)) {
                Ok(answer) => answer,
                // Of one whose successor is elsewhere nobody answers here.
                Err(RecvTimeoutError::Timeout)
                    if left > LOOK_PERIOD && !self.have_moved(call, &silent) =>
                {
                    continue;
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    let why = || "it has not answered yet".to_owned();
                    let places = silent.iter().map(|rank| (call.places[*rank], why()));
                    call.absent.extend(places);
                    return Ok(());
                }
            };
            silent.retain(|other| *other != rank);
            match answer {
                Ok(joined) => self.answered(call, rank, joined, wanted),
                Err(status) => self.refused(call, rank, &status),
            }
        }
        Ok(())
    }

    /// Whether one of these ranks is no longer where it was asked.
    fn have_moved(&self, call: &Call, ranks: &[usize]) -> bool {
        let members = self.members();
        ranks.iter().any(|rank| {
            let member = members.get(&call.places[*rank]);
            matches!(member, Some(Ok(member)) if member.told() != call.told[*rank])
        })
    }

    /// Notes what a member says that has joined.
    fn answered(&self, call: &mut Call, rank: usize, joined: v1::Joined, wanted: &Wanted<'_>) {
        let place = call.places[rank];
        if joined.version != VERSION {
            let why = format!(
                "its version: {}, and the head's: {VERSION}: run all ranks of a group with one version of hearth",
                version(&joined.version)
            );
            return call.does_not_fit(rank, why);
        }
        let needed = wanted.numerics.and_then(|all| all.get(place - 1));
        let needed = needed.filter(|_| wanted.may_be_short());
        if let Some(needed) = needed.filter(|needed| **needed != joined.numerics) {
            let why = format!(
                "it computes with {}, and {needed} is needed: answers would go on with other tokens",
                joined.numerics
            );
            return drop(call.absent.insert(place, why));
        }
        call.joined.insert(rank, joined);
    }

    /// Notes why a member has not joined.
    fn refused(&self, call: &mut Call, rank: usize, status: &Status) {
        if status.code() == Code::FailedPrecondition {
            return call.does_not_fit(rank, status.message().to_owned());
        }
        let known = status.metadata().get(EPOCH);
        if let Some(epoch) = known.and_then(|known| known.to_str().ok()?.parse().ok()) {
            self.last_epoch.fetch_max(epoch, Ordering::Relaxed);
        }
        let why = match call.group.loss(rank, status) {
            GroupError::Lost { member, why } if member != call.group.name(rank) => {
                format!("it has lost {member}: {why}")
            }
            _ => status.message().to_owned(),
        };
        call.absent.insert(call.places[rank], why);
    }

    /// A group whose members have all joined.
    fn formed(
        &self,
        call: Call,
        standing: &mut Standing,
        (absent, short): (&Absent, Option<String>),
    ) -> Formed {
        let Call {
            group,
            told,
            places,
            joined,
            ..
        } = call;
        tracing::info!(
            epoch = group.epoch,
            members = group.size(),
            "a group has formed"
        );
        *lock(&self.missing) = None;
        self.membership.set_missing(None);
        let is_away = |place| absent.contains_key(&place);
        let attendance = &mut standing.attendance;
        attendance.formed(&places, is_away, Instant::now());
        standing.current = Some((Arc::clone(&group), places.clone()));
        let others = told.into_iter().skip(1).zip(joined.values());
        let placed = others.map(|(member, joined)| v1::MemberPlacement {
            name: member.name,
            endpoint: member.endpoint,
            placement: joined.placement.clone(),
        });
        self.membership.note_members(placed.collect());
        let numerics = joined.into_values().map(|joined| joined.numerics).collect();
        let (group_now, membership) = (Arc::clone(&group), self.membership.clone());
        let watched = watch(group_now, membership, self.patience);
        self.runtime.spawn(watched);
        Formed {
            group,
            places,
            numerics,
            short,
        }
    }
}

impl Call {
    /// Notes that a member does not fit, and why.
    fn does_not_fit(&mut self, rank: usize, why: String) {
        self.absent.insert(self.places[rank], why.clone());
        let member = self.group.name(rank);
        self.unfit.get_or_insert(GroupError::Unfit { member, why });
    }
}

impl Former for NetFormer {
    fn form(&self, patience: Duration, wanted: &Wanted<'_>) -> Result<Option<Formed>, GroupError> {
        let deadline = Instant::now() + patience;
        let standing = &mut *lock(&self.standing);
        standing.together(Instant::now());
        let _within = self.runtime.enter();
        let formed = match (self.membership.has_left(), wanted.may_be_short()) {
            (true, _) => Ok(None),
            (false, false) => self.form_whole(patience, wanted, standing),
            (false, true) => self.form_most(patience, wanted, standing),
        };
        // Whoever asks again does so in a moment.
        let is_apart = standing.current.is_none() || self.membership.has_left();
        if matches!(formed, Ok(None)) && is_apart {
            let left = deadline.saturating_duration_since(Instant::now());
            std::thread::sleep(left.min(RETRY_PERIOD));
        }
        formed
    }
}

impl NetFormer {
    /// Forms a group of all members. Those that have not answered get more time each time, up to that after which they would be lost:
    /// asked anew each time before they have answered, slow ones would never come together.
    fn form_whole(
        &self,
        patience: Duration,
        wanted: &Wanted<'_>,
        standing: &mut Standing,
    ) -> Result<Option<Formed>, GroupError> {
        let patience = patience.max(standing.patience);
        let deadline = Instant::now() + patience;
        let mut members = Vec::new();
        for (place, member) in self.members() {
            match member {
                Ok(member) => members.push((place, member)),
                Err(why) => {
                    self.miss(place, &why);
                    return Ok(None);
                }
            }
        }
        let call = self.all_of(members, deadline, wanted)?;
        if call.is_some() {
            standing.patience = Duration::ZERO;
        } else if Instant::now() >= deadline {
            standing.patience = (2 * patience).min(SILENCE);
        }
        Ok(call.map(|call| self.formed(call, standing, (&Absent::new(), None))))
    }

    /// An epoch that all of these members have joined: `None` if one has not, or not yet.
    fn all_of(
        &self,
        members: Vec<(usize, Member)>,
        deadline: Instant,
        wanted: &Wanted<'_>,
    ) -> Result<Option<Call>, GroupError> {
        let mut call = self.epoch_of(members);
        if !self.enter(&call) {
            return Ok(None);
        }
        let ranks = (1..call.places.len()).collect();
        self.invite(&mut call, ranks, deadline, (wanted, true))?;
        match call.absent.is_empty() {
            true => Ok(Some(call)),
            false => self.in_vain(&mut call),
        }
    }

    /// An epoch whose members are not enough: it is over.
    fn in_vain<T>(&self, call: &mut Call) -> Result<Option<T>, GroupError> {
        call.group.leave();
        if let Some(unfit) = call.unfit.take() {
            return Err(unfit);
        }
        if let Some((place, why)) = call.absent.iter().next() {
            self.miss(*place, why);
        }
        Ok(None)
    }

    /// Forms a group of the most members that come, if these are more than are together now. Whoever is together is asked last: it
    /// would leave the others for it.
    fn form_most(
        &self,
        patience: Duration,
        wanted: &Wanted<'_>,
        standing: &mut Standing,
    ) -> Result<Option<Formed>, GroupError> {
        let now = Instant::now();
        let together = standing.together(now);
        let (members, mut absent) = self.askable(standing, &together, now);
        let chosen = |standing: &Standing, there: &[usize]| {
            let chosen = standing.attendance.chosen(there, wanted.fits);
            chosen.filter(|chosen| chosen.len() > together.len())
        };
        let all: Vec<usize> = members.keys().copied().collect();
        if chosen(standing, &all).is_none() {
            return Ok(None);
        }
        let mut call = self.epoch_of(members.clone().into_iter().collect());
        let ranks = 1..call.places.len();
        let is_here = |rank: &usize| together.contains(&call.places[*rank]);
        let (here, others) = ranks.partition::<Vec<usize>, _>(is_here);
        if together.is_empty() && !self.enter(&call) {
            return Ok(None);
        }
        self.invite(&mut call, others, now + patience, (wanted, false))?;
        let mut there = call.there();
        there.extend(&together);
        let Some(next) = chosen(standing, &there) else {
            return self.in_vain(&mut call);
        };
        if next.len() == call.places.len() && !here.is_empty() {
            if !self.enter(&call) {
                return Ok(None);
            }
            self.invite(&mut call, here, Instant::now() + patience, (wanted, false))?;
        }
        absent.extend(call.absent.clone());
        let short = self.short(standing, &next, &absent);
        if call.joined.len() + 1 == next.len() && next.len() == call.places.len() {
            return Ok(Some(self.formed(call, standing, (&absent, short))));
        }
        call.group.leave();
        let next = next.iter();
        let next = next.filter_map(|place| Some((*place, members.get(place)?.clone())));
        let call = self.all_of(next.collect(), Instant::now() + patience, wanted)?;
        Ok(call.map(|call| self.formed(call, standing, (&absent, short))))
    }

    /// Members that can be asked to join, by place, and why others cannot.
    fn askable(
        &self,
        standing: &Standing,
        together: &[usize],
        now: Instant,
    ) -> (BTreeMap<usize, Member>, Absent) {
        let (mut members, mut absent) = (BTreeMap::new(), Absent::new());
        for (place, member) in self.members() {
            let is_paused = standing.attendance.is_paused(place, now);
            match member {
                Ok(_) if is_paused && !together.contains(&place) => {
                    absent.insert(place, PAUSED.to_owned());
                }
                Ok(member) => drop(members.insert(place, member)),
                Err(why) => drop(absent.insert(place, why)),
            }
        }
        // Of fewer than all, the others could do nothing.
        if !absent.is_empty() {
            members.retain(|place, _| standing.attendance.stands_in(*place));
        }
        (members, absent)
    }

    /// Of how many ranks a group is, and who is missing and why; `None` if nobody is.
    fn short(&self, standing: &Standing, places: &[usize], absent: &Absent) -> Option<String> {
        let planned = self.names.len();
        let missing = (0..planned).filter(|place| !places.contains(place));
        let missing: Vec<String> = missing
            .map(|place| {
                let why = match absent.get(&place) {
                    Some(why) => why,
                    None if standing.attendance.stands_in(place) => SPARE,
                    None => OWN_SHARE,
                };
                format!("{} ({why})", self.name(place))
            })
            .collect();
        let ranks = places.len();
        (ranks < planned)
            .then(|| format!("{ranks} of {planned} ranks, without {}", missing.join(", ")))
    }
}

/// Looks again and again at what the members of a group say that they do, until it is over: tells what is slow, and loses whoever will
/// not go on.
async fn watch(group: Arc<NetGroup>, membership: Membership, patience: Duration) {
    let mut slow = Slow::default();
    while group.lost().is_none() {
        let found = judge(
            &Told {
                beats: group.beats(),
                awaited: group.awaited(),
                name: &|rank| group.name(rank),
            },
            patience,
        );
        membership.set_slow(slow.tell(found.slow, Instant::now()));
        if let Some((rank, why)) = found.lost {
            group.lose(rank, &why);
        }
        tokio::time::sleep(BEAT_PERIOD).await;
    }
    membership.set_slow(None);
}

/// Each of these is changed as a whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
