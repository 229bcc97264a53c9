//! Which cluster is asked, whose objects of it, and what to do when it gives no answer.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{anyhow, bail};
use clap::Args;
use hearth_controller_core::key::Key;
use hearth_controller_core::names::LABEL_DEPLOYMENT;
use hearth_controller_core::observed::PodView;
use hearth_crds::{InferenceDeployment, InferencePlan, NodeProfileStatus};
use kube::Client;
use kube::api::{Api, ListParams};

use crate::cluster::client::connect_to;
use crate::cluster::failure::Failure;
use crate::cluster::lean::{LeanDeployment, LeanPlan, LeanPod, LeanProfile, owner};
use crate::cluster::snapshot::list;
use crate::telemetry::Telemetry;
use crate::terminal::{table, ui};

/// Which cluster, and which namespace.
#[derive(Args)]
pub(crate) struct AccessArgs {
    /// Context of the kubeconfig (default: its current one)
    #[arg(long, value_name = "NAME", global = true)]
    context: Option<String>,
    /// The kubeconfig (default: KUBECONFIG, else ~/.kube/config)
    #[arg(long, value_name = "FILE", global = true)]
    kubeconfig: Option<PathBuf>,
    /// Namespace (default: the context's)
    #[arg(short, long, value_name = "NAME", global = true)]
    namespace: Option<String>,
}

/// Which namespaces a list is of.
#[derive(Args, Clone, Copy)]
pub(super) struct ScopeArgs {
    /// All namespaces, whatever --namespace says
    #[arg(short = 'A', long)]
    pub(super) all_namespaces: bool,
}

/// A cluster that answers to somebody.
pub(super) struct Access {
    /// Sends the requests.
    pub(super) client: Client,
    /// The namespace that is asked.
    pub(super) namespace: String,
    /// Whether somebody named it.
    pub(super) is_named: bool,
    /// The program's name, for what to do next.
    pub(super) program: &'static str,
    /// The API server's address.
    pub(super) address: String,
}

/// A deployment as a list has it.
pub(super) struct Listed {
    /// Its namespace and name.
    pub(super) key: Key,
    /// Its uid.
    pub(super) uid: String,
    /// When it was created, in seconds since 1970.
    pub(super) created_s: Option<i64>,
    /// The deployment, or why this version cannot read it.
    pub(super) read: Result<InferenceDeployment, String>,
}

impl Access {
    /// Finds the cluster; nothing is sent yet.
    ///
    /// # Errors
    /// There is no usable kubeconfig, or not that context in it.
    pub(super) async fn open(args: &AccessArgs, program: &'static str) -> anyhow::Result<Self> {
        let (file, context) = (args.kubeconfig.as_deref(), args.context.as_deref());
        let telemetry = Arc::new(Telemetry::new());
        let (client, address) = connect_to(file, context, telemetry).await?;
        let namespace = args.namespace.clone();
        Ok(Self {
            is_named: namespace.is_some(),
            namespace: namespace.unwrap_or_else(|| client.default_namespace().to_owned()),
            client,
            program,
            address,
        })
    }

    /// The deployments of the namespace, or of all of them, by namespace and name.
    ///
    /// # Errors
    /// The API server's, in words.
    pub(super) async fn deployments(&self, scope: ScopeArgs) -> anyhow::Result<Vec<Listed>> {
        let api: Api<LeanDeployment> = match scope.all_namespaces {
            true => Api::all(self.client.clone()),
            false => self.api(),
        };
        let found = list(&api, &ListParams::default()).await;
        let found = found.map_err(|failure| self.told("InferenceDeployments", &failure))?;
        let mut all: Vec<Listed> = found.into_iter().map(Listed::of).collect();
        all.sort_by(|a, b| a.key.cmp(&b.key));
        for one in &all {
            if let Err(why) = &one.read {
                let key = &one.key;
                ui::say(format_args!("{key} cannot be read by this version: {why}"));
            }
        }
        Ok(all)
    }

    /// The deployment of that name, with its uid.
    ///
    /// # Errors
    /// There is none, with the names that there are.
    pub(super) async fn deployment(
        &self,
        name: &str,
    ) -> anyhow::Result<(Listed, InferenceDeployment)> {
        let all = ScopeArgs {
            all_namespaces: false,
        };
        let all = self.deployments(all).await?;
        let names: Vec<String> = all.iter().map(|one| one.key.name.to_string()).collect();
        let Some(listed) = all.into_iter().find(|one| *one.key.name == *name) else {
            return Err(unknown(name, &self.namespace, &names));
        };
        match &listed.read {
            Ok(deployment) => {
                let deployment = deployment.clone();
                Ok((listed, deployment))
            }
            Err(why) => bail!(
                "{name} is of a version of the API that this program cannot read: {why}\n  use the version of Hearth that the cluster has"
            ),
        }
    }

    /// The Pods of a deployment, by rank.
    ///
    /// # Errors
    /// The API server's, in words.
    pub(super) async fn pods(&self, of: &Listed) -> anyhow::Result<Vec<PodView>> {
        let api: Api<LeanPod> = Api::namespaced(self.client.clone(), &of.key.namespace);
        let labels = format!("{LABEL_DEPLOYMENT}={}", of.key.name);
        let found = list(&api, &ListParams::default().labels(&labels)).await;
        let found = found.map_err(|failure| self.told("Pods", &failure))?;
        // Anyone can write a label.
        let own = found
            .into_iter()
            .filter(|pod| owner(&pod.metadata) == of.uid);
        let mut pods: Vec<PodView> = own.map(LeanPod::into_view).collect();
        pods.sort_by(|a, b| (&a.rank, &a.name).cmp(&(&b.rank, &b.name)));
        Ok(pods)
    }

    /// The plan in force of a deployment; `None` before the first one.
    ///
    /// # Errors
    /// The API server's, in words, or that this version cannot read the plan.
    pub(super) async fn plan(
        &self,
        deployment: &InferenceDeployment,
        namespace: &str,
    ) -> anyhow::Result<Option<InferencePlan>> {
        let read = self.plan_as_read(deployment, namespace).await?;
        read.map_err(|unreadable| {
            anyhow!("{unreadable}\n  use the version of Hearth that the cluster has")
        })
    }

    /// Same as [`Self::plan`], with the words for a plan that this version cannot read.
    ///
    /// # Errors
    /// The API server's, in words.
    pub(super) async fn plan_as_read(
        &self,
        deployment: &InferenceDeployment,
        namespace: &str,
    ) -> anyhow::Result<Result<Option<InferencePlan>, String>> {
        let status = deployment.status.as_ref();
        let Some(named) = status.and_then(|status| status.plan.as_ref()) else {
            return Ok(Ok(None));
        };
        let api: Api<LeanPlan> = Api::namespaced(self.client.clone(), namespace);
        let found = api.get_opt(&named.name).await.map_err(Failure::from);
        let found = found.map_err(|failure| self.told("InferencePlans", &failure))?;
        let read = found.map(|lean| lean.plan).transpose();
        Ok(read.map_err(|unreadable| {
            let (name, why) = (&named.name, &unreadable.why);
            format!("plan {name} cannot be read by this version: {why}")
        }))
    }

    /// The nodes' profiles by name; none, which is said, if they may not be read.
    ///
    /// # Errors
    /// The API server's, in words.
    pub(super) async fn profiles(&self) -> anyhow::Result<BTreeMap<String, NodeProfileStatus>> {
        let api: Api<LeanProfile> = Api::all(self.client.clone());
        let found = match list(&api, &ListParams::default()).await {
            Ok(found) => found,
            Err(Failure::Forbidden(why)) => {
                ui::say(format_args!("what nodes store is not shown: {why}"));
                return Ok(BTreeMap::new());
            }
            Err(failure) => return Err(self.told("NodeProfiles", &failure)),
        };
        let named = found.into_iter().filter_map(|lean| {
            let status = lean.status.ok().flatten()?;
            Some((lean.metadata.name?, status))
        });
        Ok(named.collect())
    }

    /// The objects of a kind in the namespace.
    pub(super) fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Says that a list is empty, and what to do.
    pub(super) fn say_none(&self, scope: ScopeArgs) {
        let program = self.program;
        let serve = "serve one: kubectl apply -f FILE";
        if scope.all_namespaces {
            ui::say(format_args!("there is no InferenceDeployment\n  {serve}"));
        } else {
            ui::say(format_args!(
                "there is no InferenceDeployment in the namespace {}\n  of all namespaces: {program} status -A; {serve}",
                self.namespace
            ));
        }
    }

    /// What went wrong with a request for `what`, and what to do.
    pub(super) fn told(&self, what: &str, failure: &Failure) -> anyhow::Error {
        told(what, &self.address, failure)
    }
}

impl Listed {
    fn of(lean: LeanDeployment) -> Self {
        let meta = &lean.metadata;
        let text = |text: &Option<String>| text.as_deref().unwrap_or_default().to_owned();
        let created = meta.creation_timestamp.as_ref();
        Self {
            key: Key::new(&text(&meta.namespace), &text(&meta.name)),
            uid: text(&meta.uid),
            created_s: created.map(|time| time.0.as_second()),
            read: lean.deployment,
        }
    }
}

/// A table with a column for the namespace where it is of all of them.
pub(super) fn placed<const N: usize>(
    scope: ScopeArgs,
    header: [&str; N],
    rows: impl Iterator<Item = (String, [String; N])>,
) -> String {
    let namespace = scope.all_namespaces;
    let header: Vec<&str> = namespace
        .then_some("NAMESPACE")
        .into_iter()
        .chain(header)
        .collect();
    let rows = rows.map(|(of, row)| namespace.then_some(of).into_iter().chain(row));
    table::plain(&header, rows)
}

/// `-` where there is nothing to show.
pub(super) fn or_dash(text: Option<String>) -> String {
    text.filter(|text| !text.is_empty())
        .unwrap_or_else(|| "-".to_owned())
}

fn unknown(name: &str, namespace: &str, names: &[String]) -> anyhow::Error {
    match names {
        [] => anyhow!(
            "there is no InferenceDeployment {name} in the namespace {namespace}, nor any other\n  name another namespace: -n NAME"
        ),
        names => anyhow!(
            "there is no InferenceDeployment {name} in the namespace {namespace}\n  there are: {}",
            names.join(", ")
        ),
    }
}

pub(super) fn told(what: &str, address: &str, failure: &Failure) -> anyhow::Error {
    const OTHER: &str = "use another context: --context NAME";
    match failure {
        Failure::Forbidden(why) if why.contains("Unauthorized") => anyhow!(
            "the cluster at {address} does not know you: {why}\n  renew the credentials of this context, or {OTHER}"
        ),
        Failure::Forbidden(why) => anyhow!(
            "{what} may not be read: {why}\n  ask whoever runs the cluster for that right, or {OTHER}"
        ),
        // Of a list: the whole kind is missing.
        Failure::NotFound(_) if what.starts_with("Inference") || what == "NodeProfiles" => anyhow!(
            "the cluster at {address} does not know {what}\n  install Hearth there: helm install hearth charts/hearth -n hearth-system --create-namespace; or {OTHER}"
        ),
        Failure::Network(why) => anyhow!(
            "the cluster at {address} does not answer: {why}\n  check that it is up and can be reached from here, or {OTHER}"
        ),
        other => anyhow!("{what} cannot be read: {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_told_with_what_is() {
        let names = ["chat".to_owned(), "code".to_owned()];
        let words = unknown("demo", "team", &names).to_string();
        assert!(words.contains("demo in the namespace team"), "{words}");
        assert!(words.ends_with("there are: chat, code"), "{words}");
        let words = unknown("demo", "team", &[]).to_string();
        assert!(words.contains("nor any other"), "{words}");
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        let told = |failure: Failure| told("Pods", "https://here:6443", &failure).to_string();
        for (failure, words) in [
            (
                Failure::Forbidden("pods is forbidden".into()),
                "ask whoever runs",
            ),
            (
                Failure::Forbidden("Unauthorized".into()),
                "renew the credentials",
            ),
            (
                Failure::Network("connection refused".into()),
                "https://here:6443 does not answer",
            ),
            (Failure::Server("etcd".into()), "Pods cannot be read: etcd"),
        ] {
            let said = told(failure);
            assert!(said.contains(words), "no {words:?} in {said}");
        }
        let kind = Failure::NotFound("the server could not find it".into());
        let said = super::told("InferenceDeployments", "https://here:6443", &kind).to_string();
        assert!(said.contains("install Hearth there"), "{said}");
    }

    #[test]
    fn the_namespace_is_a_column_of_all_namespaces_only() {
        let of = |all_namespaces| {
            let rows = [("team".to_owned(), ["demo".to_owned()])].into_iter();
            placed(ScopeArgs { all_namespaces }, ["NAME"], rows)
        };
        let words =
            |text: &str| -> Vec<String> { text.split_whitespace().map(str::to_owned).collect() };
        assert_eq!(words(&of(false)), ["NAME", "demo"]);
        assert_eq!(words(&of(true)), ["NAMESPACE", "NAME", "team", "demo"]);
    }
}
