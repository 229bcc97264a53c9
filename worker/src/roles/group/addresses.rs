//! Where the members of a group serve.

use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::Context;
use hearth_crds::{PlanRank, Routes, read_versioned};
use hearth_transport::Endpoint;

use super::net::Member;

/// What tells the head where the others are.
pub(super) enum Addresses {
    /// The plan did, once and for all: by rank.
    Planned(Vec<Endpoint>),
    /// A file of routes, which is read whenever a group forms: members that are started again may be elsewhere.
    Listed(PathBuf),
}

impl Addresses {
    /// The endpoints of a plan's ranks, in order.
    ///
    /// # Errors
    /// An error if a rank has none.
    pub(super) fn planned<'a>(ranks: impl Iterator<Item = &'a PlanRank>) -> anyhow::Result<Self> {
        let endpoint = |rank: &PlanRank| {
            let endpoint = rank.endpoint.as_deref();
            let endpoint =
                endpoint.with_context(|| format!("the plan gives {} no endpoint", rank.name))?;
            Ok(endpoint.parse()?)
        };
        let endpoints = ranks.map(endpoint).collect::<anyhow::Result<_>>()?;
        Ok(Self::Planned(endpoints))
    }

    /// The members of these names and nodes, in order; the name of one whose address is not known yet.
    ///
    /// # Errors
    /// An error if the file cannot be read.
    pub(super) fn of(
        &self,
        names: &[(String, String)],
    ) -> anyhow::Result<Vec<Result<Member, String>>> {
        let listed = match self {
            Self::Planned(endpoints) => {
                let members = names.iter().zip(endpoints);
                let member = |((name, node), endpoint): (&(String, String), &Endpoint)| Member {
                    name: name.clone(),
                    node: node.clone(),
                    endpoint: endpoint.clone(),
                };
                return Ok(members.map(member).map(Ok).collect());
            }
            Self::Listed(file) => {
                let text = match std::fs::read(file) {
                    Ok(text) => text,
                    Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
                    Err(error) => {
                        return Err(error).with_context(|| format!("--routes {}", file.display()));
                    }
                };
                if text.trim_ascii().is_empty() {
                    Vec::new()
                } else {
                    let routes: Routes = read_versioned(&text)
                        .with_context(|| format!("--routes {}", file.display()))?;
                    routes.workers
                }
            }
        };
        let mut members = Vec::with_capacity(names.len());
        for (name, node) in names {
            let Some(route) = listed.iter().find(|route| route.name == *name) else {
                members.push(Err(name.clone()));
                continue;
            };
            let endpoint = route.endpoint.parse().with_context(|| name.clone())?;
            members.push(Ok(Member {
                name: name.clone(),
                node: node.clone(),
                endpoint,
            }));
        }
        Ok(members)
    }
}
