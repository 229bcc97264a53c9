//! What a follower agrees to when the head of a group asks it to join.

use hearth_model::ExpertParallel;
use hearth_parallel::{Leg, Route};
use hearth_transport::v1;

use super::net::Member;
use super::{Place, Task};

/// What must be the same at all members: the release, and a number that grows with what they say to each other or with what equal
/// numerics mean, also between two releases.
pub(super) const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), ", groups 5");

/// A member's version in words; versions before 0.1.0, groups 1 say none.
pub(super) fn version(told: &str) -> &str {
    match told {
        "" => "an earlier one that does not say it",
        told => told,
    }
}

/// What a follower has: it does not change as long as the process runs.
pub(super) struct Terms {
    pub(super) place: Place,
    pub(super) model_fingerprint: String,
    /// What each layer of its cache is.
    pub(super) kv_layout: String,
    /// Blocks that its cache has.
    pub(super) kv_blocks: u32,
}

/// A group that a follower can join.
#[derive(Debug)]
pub(super) struct Agreed {
    pub(super) work: Work,
    pub(super) members: Vec<Member>,
}

/// What a follower is to do in a group.
#[derive(Debug)]
pub(super) enum Work {
    /// Compute its windows on this route.
    Ring(Route),
    /// Compute its share of each pass.
    Share,
}

impl Terms {
    /// The work and the members of a group that this rank can join.
    ///
    /// # Errors
    /// Says what does not fit, and what to do.
    pub(super) fn agree(&self, asked: &v1::Join) -> Result<Agreed, String> {
        // First: what else differs may be because of it.
        if asked.version != VERSION {
            return Err(format!(
                "its version: {VERSION}, and the head's: {}: run all ranks of a group with one version of hearth",
                version(&asked.version)
            ));
        }
        let is_short = self.is_short(asked);
        // Among fewer than are planned, those behind a lost one move up.
        let place = match is_short {
            true => asked.rank as usize,
            false => self.place.place,
        };
        let own = asked.members.get(place).map(|member| &*member.name);
        let (work, task) = self.work(asked)?;
        if is_short && !self.place.stands_in {
            return Err(format!(
                "it has its own share of the experts alone, and the head wants it among {} of {} peers: start all ranks of a group with one plan",
                asked.members.len(),
                asked.planned_peers
            ));
        }
        let fields = [
            ("rank", asked.rank.to_string(), place.to_string()),
            (
                "name",
                own.unwrap_or("not there").to_owned(),
                self.place.name.clone(),
            ),
            (
                "model",
                asked.model_fingerprint.clone(),
                self.model_fingerprint.clone(),
            ),
            ("task", task, told(&self.place.task)),
            ("cache", asked.kv_layout.clone(), self.kv_layout.clone()),
        ];
        for (field, asked, own) in fields {
            if asked != own {
                return Err(format!(
                    "its {field}: {own}, and the head wants {asked}: start all ranks of a group with one plan and one model"
                ));
            }
        }
        if asked.kv_blocks > self.kv_blocks {
            return Err(format!(
                "its cache has {} blocks, and the head wants {}: start all ranks of a group with one plan",
                self.kv_blocks, asked.kv_blocks
            ));
        }
        Ok(Agreed {
            work,
            members: members(asked)?,
        })
    }

    /// Whether some of the peers that are planned are left out.
    fn is_short(&self, asked: &v1::Join) -> bool {
        let is_shared = matches!(self.place.task, Task::Share { .. });
        is_shared && asked.members.len() < asked.planned_peers as usize
    }

    /// What the head wants of this rank, also in words.
    fn work(&self, asked: &v1::Join) -> Result<(Work, String), String> {
        let experts = match asked.experts() {
            v1::Experts::Unspecified => None,
            v1::Experts::SmallEp => Some(ExpertParallel::SmallEp),
            v1::Experts::Ep => Some(ExpertParallel::Ep),
        };
        if let Some(experts) = experts {
            let peers = asked.members.len().max(asked.planned_peers as usize);
            return Ok((Work::Share, told(&Task::Share { peers, experts })));
        }
        let Task::Windows { layers, .. } = self.place.task else {
            return Ok((Work::Share, "windows of layers".to_owned()));
        };
        let route = route(asked, layers)?;
        let part = route.part(self.place.place);
        let task = part.map_or("no layers".to_owned(), |part| {
            told(&Task::Windows { part, layers })
        });
        Ok((Work::Ring(route), task))
    }
}

/// A task in words.
fn told(task: &Task) -> String {
    match task {
        Task::Windows { part, .. } => {
            let windows = part.windows().iter();
            let windows: Vec<String> = windows
                .map(|layers| format!("{}-{}", layers.start, layers.end - 1))
                .collect();
            format!("layers {}", windows.join(", "))
        }
        Task::Share { peers, experts } => format!("a share of {peers} by {experts:?}"),
    }
}

fn route(asked: &v1::Join, layers: usize) -> Result<Route, String> {
    let leg = |leg: &v1::Leg| Leg {
        rank: leg.rank as usize,
        layers: leg.first_layer as usize..leg.end_layer as usize,
    };
    let legs = asked.legs.iter().map(leg).collect();
    let route = Route::new(legs, layers).map_err(|error| error.to_string())?;
    match route.ranks() <= asked.members.len() {
        true => Ok(route),
        false => Err(format!(
            "the head names {} members, and gives layers to {}",
            asked.members.len(),
            route.ranks()
        )),
    }
}

fn members(asked: &v1::Join) -> Result<Vec<Member>, String> {
    let member = |member: &v1::Member| {
        let endpoint = member.endpoint.parse();
        Ok(Member {
            name: member.name.clone(),
            node: member.node.clone(),
            endpoint: endpoint.map_err(|error| {
                format!("the head gives an address of {}: {error}", member.name)
            })?,
        })
    };
    asked.members.iter().map(member).collect()
}

#[cfg(test)]
mod tests {
    use hearth_model::Part;

    use super::*;

    fn terms() -> Terms {
        let part = Part::new(vec![1..2, 4..6], false, 8).expect("a part");
        of(Task::Windows { part, layers: 8 })
    }

    fn of(task: Task) -> Terms {
        Terms {
            place: Place {
                name: "stage-0".to_owned(),
                place: 1,
                task,
                is_self_sufficient: false,
                stands_in: false,
                kv_bytes: 0,
            },
            model_fingerprint: "demo".to_owned(),
            kv_layout: "f32 4".to_owned(),
            kv_blocks: 100,
        }
    }

    fn join(edit: impl FnOnce(&mut v1::Join)) -> v1::Join {
        let leg = |(rank, first_layer, end_layer)| v1::Leg {
            rank,
            first_layer,
            end_layer,
        };
        let member = |(name, endpoint): (&str, &str)| v1::Member {
            name: name.to_owned(),
            endpoint: endpoint.to_owned(),
            node: "attic".to_owned(),
        };
        let mut join = v1::Join {
            rank: 1,
            members: [("decode-0", "10.0.0.1:80"), ("stage-0", "10.0.0.2:80")]
                .map(member)
                .to_vec(),
            model_fingerprint: "demo".to_owned(),
            legs: [(0, 0, 1), (1, 1, 2), (0, 2, 4), (1, 4, 6), (0, 6, 8)]
                .map(leg)
                .to_vec(),
            kv_layout: "f32 4".to_owned(),
            kv_blocks: 90,
            waiting_bytes: 1,
            experts: 0,
            version: VERSION.to_owned(),
            planned_peers: 0,
        };
        edit(&mut join);
        join
    }

    #[test]
    fn a_stage_joins_whatever_the_others_do_as_long_as_its_own_part_is_the_same() {
        let ranks = |agreed: &Agreed| match &agreed.work {
            Work::Ring(route) => route.ranks(),
            Work::Share => 0,
        };
        let agreed = terms().agree(&join(|_| {})).expect("it fits");
        assert_eq!(ranks(&agreed), 2);
        assert_eq!(agreed.members[1].name, "stage-0");
        let moved = join(|join| {
            join.members[0].endpoint = "10.9.9.9:80".to_owned();
            join.members.push(v1::Member {
                name: "stage-1".to_owned(),
                endpoint: "[fd00::3]:80".to_owned(),
                node: "office".to_owned(),
            });
            join.legs[2].rank = 2;
        });
        let agreed = terms().agree(&moved).expect("it fits");
        assert_eq!((ranks(&agreed), agreed.members.len()), (3, 3));
    }

    #[test]
    fn a_peer_joins_as_many_peers_as_its_plan_has() {
        let peer = of(Task::Share {
            peers: 2,
            experts: ExpertParallel::SmallEp,
        });
        let asked = |experts: v1::Experts, more: bool| {
            join(|join| {
                join.legs.clear();
                join.experts = experts.into();
                if more {
                    join.members.push(join.members[0].clone());
                }
            })
        };
        let agreed = peer.agree(&asked(v1::Experts::SmallEp, false));
        assert!(matches!(agreed.expect("it fits").work, Work::Share));
        for (experts, more, words) in [
            (v1::Experts::Ep, false, "the head wants a share of 2 by Ep"),
            (v1::Experts::SmallEp, true, "the head wants a share of 3"),
            (v1::Experts::Unspecified, false, "the head wants windows"),
        ] {
            let error = peer.agree(&asked(experts, more)).expect_err(words);
            assert!(error.contains(words), "{error}");
        }
        let error = terms()
            .agree(&asked(v1::Experts::Ep, false))
            .expect_err("no peer");
        assert!(error.contains("its task: layers 1-1, 4-5"), "{error}");
    }

    #[test]
    fn a_peer_joins_fewer_than_its_plan_has_if_it_has_all_experts() {
        let mut peer = of(Task::Share {
            peers: 4,
            experts: ExpertParallel::SmallEp,
        });
        peer.place.place = 3;
        // Two of four, of which this one comes second.
        let asked = |edit: fn(&mut v1::Join)| {
            join(|join| {
                join.legs.clear();
                join.experts = v1::Experts::SmallEp.into();
                join.planned_peers = 4;
                edit(join);
            })
        };
        let error = peer
            .agree(&asked(|_| {}))
            .expect_err("it has a share alone");
        assert!(error.contains("among 2 of 4 peers"), "{error}");
        peer.place.stands_in = true;
        let agreed = peer.agree(&asked(|_| {})).expect("it fits");
        assert_eq!(agreed.members.len(), 2);
        type Edit = fn(&mut v1::Join);
        let cases: [(Edit, &str); 3] = [
            (
                |join| join.rank = 0,
                "its name: stage-0, and the head wants decode-0",
            ),
            (|join| join.rank = 7, "the head wants not there"),
            (
                |join| join.planned_peers = 8,
                "its task: a share of 4 by SmallEp, and the head wants a share of 8",
            ),
        ];
        for (edit, words) in cases {
            let error = peer.agree(&asked(edit)).expect_err(words);
            assert!(error.contains(words), "{error}");
        }
        // Of all four, it is the fourth.
        let of_all = asked(|join| {
            let own = join.members[1].clone();
            join.members = vec![join.members[0].clone(); 3];
            join.members.push(own);
            join.rank = 1;
        });
        let error = peer.agree(&of_all).expect_err("another's rank");
        assert!(
            error.contains("its rank: 3, and the head wants 1"),
            "{error}"
        );
    }

    #[test]
    fn what_does_not_fit_is_said() {
        type Edit = fn(&mut v1::Join);
        let cases: [(Edit, &str); 11] = [
            (
                |join| join.version = "0.0.9, groups 1".into(),
                "groups 5, and the head's: 0.0.9, groups 1: run all",
            ),
            (
                |join| join.version.clear(),
                "and the head's: an earlier one that does not say it",
            ),
            (|join| join.rank = 0, "its rank: 1"),
            (
                |join| join.members[1].name = "stage-1".into(),
                "its name: stage-0",
            ),
            (
                |join| join.model_fingerprint = "other".into(),
                "its model: demo",
            ),
            (
                |join| join.legs[1].end_layer = 3,
                "where layer 3 comes next",
            ),
            (
                |join| join.legs[4].rank = 1,
                "its task: layers 1-1, 4-5, and the head wants layers 1-1, 4-7",
            ),
            (|join| join.kv_layout = "bf16 4".into(), "its cache: f32 4"),
            (|join| join.kv_blocks = 101, "its cache has 100 blocks"),
            (|join| drop(join.members.pop()), "1 members"),
            (
                |join| join.members[0].endpoint = "x".into(),
                "an address of decode-0",
            ),
        ];
        for (edit, words) in cases {
            let error = terms().agree(&join(edit)).expect_err(words);
            assert!(error.contains(words), "{error}");
        }
    }
}
