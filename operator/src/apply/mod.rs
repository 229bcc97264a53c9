//! Carries out a decision. Each write is idempotent, and a write that would change nothing is skipped.
//!
//! Services, budgets and policies are compared by digest: the object as it was desired when last applied, and the live
//! object that resulted. After a restart, an existing object is read once instead. Drift is corrected.

pub(crate) mod report;
mod scaler;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use hearth_controller_core::decision::{Decision, Marks, PodEnd};
use hearth_controller_core::key::Key;
use hearth_controller_core::names::{ANNOTATION_PLAN_GENERATION, DEVICE_GROUP, LABEL_ROLE};
use hearth_controller_core::plan_record::PlanStatusChange;
use hearth_crds::{API_VERSION, InferencePlan};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{ApiResource, DynamicObject, ObjectMeta};
use kube::core::GroupVersionKind;
use serde_json::{Value, json};

use crate::cluster::api::{ApiClient, Collection};
use crate::cluster::cache::{CacheNotifier, State, Touched};
use crate::cluster::digest::{self, Digest};
use crate::cluster::failure::Failure;
use crate::cluster::lean::{Facts, LeanPlan, LeanPod};
use crate::cluster::table::Identity;

/// The kinds of objects that accompany a deployment's Pods: API version, kind, plural.
const KINDS: [(&str, &str, &str); 3] = [
    ("v1", "Service", "services"),
    ("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    ("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
];

/// The remedy for CustomResourceDefinitions that drop fields, as shown to the user.
const OLD_DEFINITIONS: &str = "the CustomResourceDefinition of InferencePlan is older than this operator and drops \
    spec.inputs and the status: run helm upgrade with crds.install=true, or hearth crd | kubectl apply --server-side -f -";

/// Executor of decisions.
pub(crate) struct Applier {
    requests: ApiClient,
    notifier: CacheNotifier,
    /// Objects as last applied, by owner.
    applied: Mutex<AppliedByOwner>,
}

/// The objects of each owner, as a short list by kind and name.
type AppliedByOwner = HashMap<Arc<str>, Vec<(&'static str, Box<str>, Applied)>>;

/// Digest desired of an object when it was last found in order or corrected, with the live digest and version at that
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Applied {
    desired: Digest,
    live: Digest,
    version: u64,
}

/// The deployment that a decision belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subject<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) uid: &'a str,
}

impl Applier {
    /// Creates an applier that writes through `requests` and reports the results to the cache.
    pub(crate) fn new(requests: ApiClient, notifier: CacheNotifier) -> Self {
        Self {
            requests,
            notifier,
            applied: Mutex::default(),
        }
    }

    /// Forgets a deployment that is gone.
    pub(crate) fn forget(&self, uid: &str) {
        self.applied().remove(uid);
    }

    /// Writes what the decision asks for, in its order, up to but not including the status. Stops at the first
    /// failure, except for rejected Pods.
    ///
    /// # Errors
    /// The reason that it stopped.
    pub(crate) async fn apply(
        &self,
        subject: Subject<'_>,
        decision: &Decision,
    ) -> Result<(), Failure> {
        for object in &decision.objects {
            self.object(subject, object).await?;
        }
        for (kind, name) in &decision.remove_objects {
            self.remove(subject, kind, name).await?;
        }
        if let Some(plan) = &decision.create_plan {
            self.create_plan(subject, plan).await?;
        }
        for change in &decision.plan_statuses {
            self.plan_status(subject, change).await?;
        }
        for template in &decision.create_templates {
            self.create_template(subject, template).await?;
        }
        let refused = self.create_pods(subject, &decision.create_pods).await?;
        for marks in &decision.mark_pods {
            self.mark_pod(subject, marks).await?;
        }
        for end in &decision.delete_pods {
            self.delete_pod(subject, end).await?;
        }
        for name in &decision.delete_plans {
            self.delete_plan(subject, name).await?;
        }
        let scaled = self.scaler(subject, decision.scaler.as_ref()).await;
        refused.map_or(scaled, Err)
    }

    /// Creates Pods. A Pod that the API server rejects, which is the result, stops neither the other Pods nor the
    /// deletions, which may be what makes room for it.
    async fn create_pods(
        &self,
        subject: Subject<'_>,
        pods: &[Pod],
    ) -> Result<Option<Failure>, Failure> {
        let mut refused = None;
        let mut has_gateway = false;
        // A quota that rejects one of them may not have counted those created after it.
        let own = {
            let state = self.notifier.cache.lock();
            state.counted(subject.uid, subject.namespace)
        };
        for pod in pods {
            match self.create_pod(subject, pod).await {
                Err(failure) if failure.needs_a_person() => {
                    has_gateway |= pod
                        .labels()
                        .get(LABEL_ROLE)
                        .is_some_and(|it| it == "gateway");
                    refused.get_or_insert(failure);
                }
                made => made?,
            }
        }
        let generation = pods.iter().find_map(|pod| {
            let annotation = pod.annotations().get(ANNOTATION_PLAN_GENERATION)?;
            annotation.parse().ok()
        });
        match (&refused, generation) {
            (Some(Failure::Forbidden(words)), Some(generation)) => {
                self.notifier
                    .change(|state| state.forbid(subject.uid, generation, words, has_gateway, own));
            }
            (None, Some(_)) => self.notifier.change(|state| state.allow(subject.uid)),
            _ => {}
        }
        Ok(refused)
    }

    async fn object(&self, subject: Subject<'_>, object: &DynamicObject) -> Result<(), Failure> {
        let name = object.name_any();
        let kind = object
            .types
            .as_ref()
            .map_or("", |types| types.kind.as_str());
        let (kind, resource) = resource(kind)?;
        let place = Collection::of_resource(&resource, subject.namespace);
        let desired =
            serde_json::to_value(object).map_err(|error| Failure::Invalid(error.to_string()))?;
        let wanted = digest::of_value(&desired);

        if self.is_in_order(subject, kind, &name, wanted) {
            return Ok(());
        }
        let is_there = match self.requests.get::<Value>(&place, &name).await {
            Ok(live) => {
                check_owner(subject, kind, &name, &live)?;
                if digest::is_within(&desired, &live)
                    && !digest::has_dropped_annotation(&desired, &live)
                {
                    self.remember(subject, kind, &name, wanted, &live);
                    return Ok(());
                }
                true
            }
            Err(Failure::NotFound(_)) => false,
            Err(other) => return Err(other),
        };
        let live = match self.requests.apply(&place, &name, &desired).await {
            Ok(live) if digest::is_within(&desired, &live) => live,
            // Server-side apply keeps what others added to a list next to our entries, so the list is written as a
            // whole.
            Ok(_) | Err(Failure::Invalid(_)) if is_there => {
                let whole = json!({"spec": desired["spec"]});
                self.requests.merge::<Value>(&place, &name, &whole).await?
            }
            other => other?,
        };
        let done = if is_there { "corrected" } else { "created" };
        tracing::info!(namespace = subject.namespace, name, "{kind} {done}");
        self.remember(subject, kind, &name, wanted, &live);
        Ok(())
    }

    /// Whether an object is known to be in its desired state.
    fn is_in_order(&self, subject: Subject<'_>, kind: &str, name: &str, wanted: Digest) -> bool {
        let Some(known) = self.known(subject.uid, kind, name) else {
            return false;
        };
        let state = self.notifier.cache.lock();
        let row = state.object(kind, &Key::new(subject.namespace, name));
        // The cache may lag behind our own write.
        known.desired == wanted
            && row.is_some_and(|row| row.value.digest == known.live || row.version < known.version)
    }

    async fn remove(&self, subject: Subject<'_>, kind: &str, name: &str) -> Result<(), Failure> {
        let (kind, resource) = resource(kind)?;
        let key = Key::new(subject.namespace, name);
        let uid = {
            let state = self.notifier.cache.lock();
            let row = state.object(kind, &key);
            row.filter(|row| &*row.owner == subject.uid)
                .map(|row| Arc::clone(&row.uid))
        };
        let Some(uid) = uid else { return Ok(()) };
        let place = Collection::of_resource(&resource, subject.namespace);
        self.requests.delete(&place, name, &uid, None).await?;
        tracing::info!(namespace = subject.namespace, name, "{kind} removed");
        self.notifier
            .change(|state| state.remove_object(kind, &key, &uid));
        if let Some(objects) = self.applied().get_mut(subject.uid) {
            objects.retain(|(its_kind, its_name, _)| (*its_kind, &**its_name) != (kind, name));
        }
        Ok(())
    }

    async fn create_plan(&self, subject: Subject<'_>, plan: &InferencePlan) -> Result<(), Failure> {
        let place = Collection::of::<InferencePlan>(subject.namespace);
        let name = plan.name_any();
        let made = self.requests.create::<LeanPlan>(&place, &name, plan).await;
        let made = match made {
            Ok(made) => {
                self.check_inputs(&place, plan, &made).await?;
                tracing::info!(namespace = subject.namespace, name, "InferencePlan made");
                made
            }
            Err(Failure::Conflict(why)) => {
                let there: LeanPlan = self.requests.get(&place, &name).await?;
                let owner = crate::cluster::lean::owner(&there.metadata);
                if owner.is_empty() && there.metadata.deletion_timestamp.is_none() {
                    return Err(orphan("InferencePlan", &name));
                }
                let is_ours = owner == subject.uid;
                let it = there.plan.as_ref().ok();
                // Another operator's, or this one's from before it was killed; the Pods are built from `plan`.
                let is_same = it.is_some_and(|it| it.spec == plan.spec);
                if !is_ours {
                    return Err(Failure::Terminating(format!("InferencePlan {name}")));
                }
                if !is_same {
                    self.take_plan(there);
                    return Err(Failure::Conflict(why));
                }
                there
            }
            Err(other) => return Err(other),
        };
        self.take_plan(made);
        Ok(())
    }

    /// Deletes a plan whose inputs an older definition has dropped, and fails: otherwise plans would be created
    /// endlessly.
    async fn check_inputs(
        &self,
        place: &Collection,
        sent: &InferencePlan,
        made: &LeanPlan,
    ) -> Result<(), Failure> {
        let has_inputs = |plan: &InferencePlan| plan.spec.inputs.is_some();
        if !has_inputs(sent) || made.plan.as_ref().map_or(true, has_inputs) {
            return Ok(());
        }
        let name = sent.name_any();
        let uid = made.metadata.uid.as_deref().unwrap_or_default();
        self.requests.delete(place, &name, uid, None).await?;
        Err(old_definitions(&name))
    }

    async fn plan_status(
        &self,
        subject: Subject<'_>,
        change: &PlanStatusChange,
    ) -> Result<(), Failure> {
        let place = Collection::of::<InferencePlan>(subject.namespace);
        let key = Key::new(subject.namespace, &change.name);
        let version = {
            let state = self.notifier.cache.lock();
            state.plans.get(&key).map(|row| row.version)
        };
        let mut metadata = json!({"name": change.name});
        if let Some(version) = version {
            // A plan of that name may have been recreated.
            metadata["resourceVersion"] = json!(version.to_string());
        }
        let object = json!({
            "apiVersion": API_VERSION, "kind": "InferencePlan", "metadata": metadata, "status": change.status,
        });
        let requests = &self.requests;
        let made = requests.apply_status::<LeanPlan>(&place, &change.name, &object);
        match made.await {
            Ok(made) => self.take_plan(made),
            // Older definitions lack the status subresource of plans.
            Err(Failure::NotFound(_))
                if requests.get::<Value>(&place, &change.name).await.is_ok() =>
            {
                return Err(old_definitions(&change.name));
            }
            Err(failure) => {
                let answer: Result<(), Failure> = Err(failure);
                self.drop_if_gone(&answer, |state| state.remove_plan(&key, ""));
                return answer;
            }
        }
        Ok(())
    }

    /// Creates a template. One that already exists is identical: its name is a digest of what it requests.
    async fn create_template(
        &self,
        subject: Subject<'_>,
        template: &DynamicObject,
    ) -> Result<(), Failure> {
        let kind = GroupVersionKind::gvk(DEVICE_GROUP, "v1", "ResourceClaimTemplate");
        let resource = ApiResource::from_gvk_with_plural(&kind, "resourceclaimtemplates");
        let place = Collection::of_resource(&resource, subject.namespace);
        let name = template.name_any();
        match self.requests.create::<Value>(&place, &name, template).await {
            Ok(_) => {
                tracing::info!(
                    namespace = subject.namespace,
                    name,
                    "ResourceClaimTemplate made"
                );
                Ok(())
            }
            Err(Failure::Conflict(_)) => Ok(()),
            Err(other) => Err(other),
        }
    }

    async fn create_pod(&self, subject: Subject<'_>, pod: &Pod) -> Result<(), Failure> {
        let place = Collection::of::<Pod>(subject.namespace);
        let name = pod.name_any();
        match self.requests.create::<LeanPod>(&place, &name, pod).await {
            Ok(made) => {
                tracing::info!(namespace = subject.namespace, name, "Pod created");
                self.take_pod(made);
                Ok(())
            }
            Err(Failure::Conflict(_)) => {
                // A stale cache, or a crash before the answer: the name shows that it is exactly the desired Pod.
                let there: LeanPod = self.requests.get(&place, &name).await?;
                let owner = crate::cluster::lean::owner(&there.metadata).to_owned();
                let is_ending = there.metadata.deletion_timestamp.is_some();
                self.take_pod(there);
                if owner.is_empty() && !is_ending {
                    return Err(orphan("Pod", &name));
                }
                if is_ending || owner != subject.uid {
                    return Err(Failure::Terminating(format!("Pod {name}")));
                }
                Ok(())
            }
            Err(other) => Err(other),
        }
    }

    async fn mark_pod(&self, subject: Subject<'_>, marks: &Marks) -> Result<(), Failure> {
        let place = Collection::of::<Pod>(subject.namespace);
        let key = Key::new(subject.namespace, &marks.name);
        let uid = {
            let state = self.notifier.cache.lock();
            state.pods.get(&key).map(|row| Arc::clone(&row.uid))
        };
        let fields = annotations(marks, uid.as_deref());
        let made = self
            .requests
            .merge::<LeanPod>(&place, &marks.name, &fields)
            .await;
        self.drop_if_gone(&made, |state| state.remove_pod(&key, ""));
        self.take_pod(made?);
        Ok(())
    }

    async fn delete_pod(&self, subject: Subject<'_>, end: &PodEnd) -> Result<(), Failure> {
        let place = Collection::of::<Pod>(subject.namespace);
        self.requests
            .delete(&place, &end.name, &end.uid, end.grace.seconds())
            .await?;
        tracing::info!(
            namespace = subject.namespace,
            name = end.name,
            grace = ?end.grace,
            "Pod asked to end"
        );
        // Either it is now terminating, which the watch will report, or it is gone: the next reconcile must know
        // either.
        let key = Key::new(subject.namespace, &end.name);
        match self.requests.get::<LeanPod>(&place, &end.name).await {
            Ok(there) => self.take_pod(there),
            Err(Failure::NotFound(_)) => {
                self.notifier
                    .change(|state| state.remove_pod(&key, &end.uid));
            }
            Err(other) => return Err(other),
        }
        Ok(())
    }

    async fn delete_plan(&self, subject: Subject<'_>, name: &str) -> Result<(), Failure> {
        let key = Key::new(subject.namespace, name);
        let uid = {
            let state = self.notifier.cache.lock();
            let row = state.plans.get(&key);
            row.filter(|row| &*row.owner == subject.uid)
                .map(|row| Arc::clone(&row.uid))
        };
        let Some(uid) = uid else { return Ok(()) };
        let place = Collection::of::<InferencePlan>(subject.namespace);
        self.requests.delete(&place, name, &uid, None).await?;
        self.notifier.change(|state| state.remove_plan(&key, &uid));
        Ok(())
    }

    /// Removes an object from the cache when a write has found it gone, so that the write is not repeated.
    fn drop_if_gone<T>(
        &self,
        answer: &Result<T, Failure>,
        drop: impl FnOnce(&mut State) -> Touched,
    ) {
        if matches!(answer, Err(Failure::NotFound(_))) {
            self.notifier.change(drop);
        }
    }

    fn take_plan(&self, plan: LeanPlan) {
        let identity = Identity::of(&plan.metadata);
        self.notifier
            .change(|state| state.put_plan(identity, plan.plan.as_ref()));
    }

    fn take_pod(&self, pod: LeanPod) {
        let identity = Identity::of(&pod.metadata);
        self.notifier
            .change(|state| state.put_pod(identity, pod.into_view()));
    }

    fn remember(
        &self,
        subject: Subject<'_>,
        kind: &'static str,
        name: &str,
        desired: Digest,
        live: &Value,
    ) {
        let facts = Facts::of(live);
        let metadata = live.get("metadata").cloned().unwrap_or_default();
        let metadata: ObjectMeta = serde_json::from_value(metadata).unwrap_or_default();
        let identity = Identity::of(&metadata);
        let applied = Applied {
            desired,
            live: facts.digest,
            version: identity.version,
        };
        let objects = &mut *self.applied();
        let objects = objects.entry(subject.uid.into()).or_default();
        objects.retain(|(its_kind, its_name, _)| (*its_kind, &**its_name) != (kind, name));
        objects.reserve_exact(1);
        objects.push((kind, name.into(), applied));
        self.notifier
            .change(|state| state.put_object(kind, identity, facts));
    }

    fn known(&self, uid: &str, kind: &str, name: &str) -> Option<Applied> {
        let applied = self.applied();
        let mut objects = applied.get(uid)?.iter();
        let of_name =
            objects.find(|(its_kind, its_name, _)| (*its_kind, &**its_name) == (kind, name));
        of_name.map(|(_, _, applied)| *applied)
    }

    fn applied(&self) -> std::sync::MutexGuard<'_, AppliedByOwner> {
        self.applied.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn resource(kind: &str) -> Result<(&'static str, ApiResource), Failure> {
    let known = KINDS.iter().find(|(_, known, _)| *known == kind);
    let Some((api_version, kind, plural)) = known else {
        return Err(Failure::Invalid(format!(
            "{kind:?} is not a kind that the operator makes"
        )));
    };
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let gvk = GroupVersionKind::gvk(group, version, kind);
    Ok((kind, ApiResource::from_gvk_with_plural(&gvk, plural)))
}

/// Rejects taking over an object that another owner controls.
fn check_owner(subject: Subject<'_>, kind: &str, name: &str, live: &Value) -> Result<(), Failure> {
    let owners = live.pointer("/metadata/ownerReferences");
    let mut owners = owners.and_then(Value::as_array).into_iter().flatten();
    let controller = owners.find(|owner| owner.get("controller") == Some(&Value::Bool(true)));
    let text = |field: &str| controller.and_then(|owner| owner.get(field)?.as_str());
    if text("uid") == Some(subject.uid) {
        return Ok(());
    }
    if text("kind") == Some("InferenceDeployment") {
        // It belongs to a deleted deployment of the same name: the cluster is about to collect it.
        return Err(Failure::Terminating(format!("{kind} {name}")));
    }
    Err(Failure::Invalid(format!(
        "there is a {kind} {name} already that is not Hearth's: rename it, or give the deployment another name"
    )))
}

fn old_definitions(plan: &str) -> Failure {
    Failure::Invalid(format!("InferencePlan {plan}: {OLD_DEFINITIONS}"))
}

/// Error for an object left behind by a deployment that was deleted without its dependents.
fn orphan(kind: &str, name: &str) -> Failure {
    Failure::Invalid(format!(
        "there is a {kind} {name} already that belongs to no deployment: delete it"
    ))
}

fn annotations(marks: &Marks, uid: Option<&str>) -> Value {
    let annotations: serde_json::Map<String, Value> = marks
        .annotations
        .iter()
        .map(|(name, value)| (name.clone(), Value::from(value.as_str())))
        .collect();
    match uid {
        Some(uid) => json!({"metadata": {"uid": uid, "annotations": annotations}}),
        None => json!({"metadata": {"annotations": annotations}}),
    }
}
