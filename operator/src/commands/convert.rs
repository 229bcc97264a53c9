//! `hearth convert`: rewrites deprecated fields of InferenceDeployments, in a cluster before `helm upgrade`, or in a
//! file.
//!
//! In a cluster the definition is updated first, since an older one would prune the new fields. The previous owner of
//! a field (helm, `kubectl apply`) owns its successor: this command leaves no entry in `managedFields` that a later
//! apply would conflict with.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use hearth_crds::{
    API_VERSION, Conversion, InferenceDeployment, InferenceDeploymentSpec, ParseError, Target,
    crds, parse_deployment, parse_deployment_for,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::cluster::client;
use crate::telemetry::Telemetry;
use crate::terminal::ui;

const EXAMPLES: &str = "Examples:\n  hearth convert --dry-run\n  hearth convert && helm upgrade hearth charts/hearth -n hearth-system\n  hearth convert -f old.yaml > new.yaml";
/// Name of the objects' definition.
const DEFINITION: &str = "inferencedeployments.hearth.dev";
/// Field manager of the writes, until the fields are returned to their previous managers.
const MANAGER: &str = "hearth-convert";
/// Longest time that the API server may take to serve an updated definition.
const PATIENCE: Duration = Duration::from_secs(60);
/// Interval at which it is polled.
const PACE: Duration = Duration::from_millis(500);

/// Arguments of `hearth convert`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ConvertArgs {
    /// Convert this file instead of a cluster's objects, and print it; - reads standard input
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    file: Option<PathBuf>,
    /// Convert the objects of this namespace. By default those of all namespaces
    #[arg(short, long, conflicts_with = "file")]
    namespace: Option<String>,
    /// Say what would change, and change nothing
    #[arg(long, conflicts_with = "file")]
    dry_run: bool,
}

/// Converts, and reports the changes and the decisions that only a person can make.
pub(crate) fn run(args: &ConvertArgs) -> anyhow::Result<()> {
    match &args.file {
        Some(file) => convert_file(file),
        None => tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?
            .block_on(convert_cluster(args)),
    }
}

/// Prints the documents of a file; kinds other than InferenceDeployment stay as they are.
fn convert_file(file: &Path) -> anyhow::Result<()> {
    let text = match file.to_str() {
        Some("-") => {
            std::io::read_to_string(std::io::stdin()).context("standard input cannot be read")
        }
        _ => std::fs::read_to_string(file).with_context(|| {
            format!(
                "{} cannot be read\n  name a file of InferenceDeployments with -f",
                file.display()
            )
        }),
    }?;
    let mut documents = Vec::new();
    let mut is_changed = false;
    let mut is_any = false;
    let mut undecided = 0;
    for document in serde_norway::Deserializer::from_str(&text) {
        let mut object = Value::deserialize(document)
            .map_err(|error| anyhow!("the file is not YAML: {error}\n  check the indentation and the colons at that place"))?;
        let found = convert_object(&mut object, &mut undecided)?;
        is_any |= found.is_some();
        is_changed |= found == Some(true);
        if !object.is_null() {
            documents.push(serde_norway::to_string(&object)?);
        }
    }
    if !is_any {
        let shown = match file.to_str() {
            Some("-") => "standard input",
            name => name.unwrap_or("the file"),
        };
        ui::say(format_args!(
            "{shown} has no InferenceDeployment: there is nothing to convert"
        ));
    }
    if is_changed {
        ui::say("comments of the file are not kept");
        ui::print_data(&documents.join("---\n"))?;
    } else {
        ui::print_data(&text)?;
    }
    match undecided {
        0 => Ok(()),
        1 => bail!("1 field needs a decision\n  change it as said above, then apply the file"),
        _ => bail!(
            "{undecided} fields need a decision\n  change them as said above, then apply the file"
        ),
    }
}

/// Converts an InferenceDeployment, or those of a list such as `kubectl get -o yaml` prints; returns whether one changed,
/// `None` if there is none. Adds the fields that an API server would still refuse to `undecided`.
fn convert_object(object: &mut Value, undecided: &mut usize) -> anyhow::Result<Option<bool>> {
    let kind = object["kind"].as_str().unwrap_or_default();
    if kind.ends_with("List") {
        let mut is_changed = None;
        for item in object["items"].as_array_mut().into_iter().flatten() {
            if let Some(changed) = convert_object(item, undecided)? {
                is_changed = Some(changed || is_changed == Some(true));
            }
        }
        return Ok(is_changed);
    }
    if kind != "InferenceDeployment" {
        return Ok(None);
    }
    let found = Found::of(object)?;
    found.report("");
    *undecided += found.refused.len();
    let is_changed = !found.conversion.is_empty();
    merge(&mut object["spec"], &Value::Object(found.conversion.patch));
    Ok(Some(is_changed))
}

/// One object, its changes, and the errors that remain afterwards.
struct Found {
    name: String,
    conversion: Conversion,
    refused: Vec<String>,
}

impl Found {
    fn of(object: &Value) -> anyhow::Result<Self> {
        let text = |field: &str| object["metadata"][field].as_str();
        let name = text("name").unwrap_or("without a name").to_owned();
        let shown = match text("namespace") {
            Some(namespace) => format!("{namespace}/{name}"),
            None => name.clone(),
        };
        let read = |spec: &Value| {
            let read = serde_json::from_value::<InferenceDeploymentSpec>(spec.clone());
            read.map_err(|error| anyhow!("{shown} cannot be read: {}", fault(spec, &error)))
        };
        let spec = read(&object["spec"])?;
        let conversion = Conversion::of(&spec)?;
        let mut converted = object["spec"].clone();
        merge(&mut converted, &Value::Object(conversion.patch.clone()));
        let whole = whole(&name, text("namespace"), &converted);
        let refused = match parse_deployment_for(&whole, Target::Cluster) {
            Ok(_) => Vec::new(),
            Err(ParseError::Fields(fields)) => fields.iter().map(ToString::to_string).collect(),
            Err(other) => bail!(other),
        };
        Ok(Self {
            name: shown,
            conversion,
            refused,
        })
    }

    /// Reports the changes, prefixed by `would`, and the decisions that are left to the author.
    fn report(&self, would: &str) {
        let (old, new) = (&self.conversion.removed, &self.conversion.added);
        if !self.conversion.is_empty() {
            let new = match new.is_empty() {
                true => "removed: its successor has the same value".to_owned(),
                false => new.join(", "),
            };
            ui::say(format_args!(
                "{}: {would}{} → {new}",
                self.name,
                old.join(", ")
            ));
        }
        for refusal in &self.refused {
            ui::say(format_args!("{}: needs a decision: {refusal}", self.name));
        }
    }
}

/// A manifest with this spec.
fn whole(name: &str, namespace: Option<&str>, spec: &Value) -> String {
    let mut metadata = json!({ "name": name });
    if let Some(namespace) = namespace {
        metadata["namespace"] = namespace.into();
    }
    let whole = json!({
        "apiVersion": API_VERSION, "kind": "InferenceDeployment", "metadata": metadata, "spec": spec,
    });
    whole.to_string()
}

/// Describes why a spec cannot be read: the field, its value and the remedy.
fn fault(spec: &Value, error: &serde_json::Error) -> String {
    match parse_deployment(&whole("unreadable", None, spec)) {
        Err(fields) => fields.to_string(),
        Ok(_) => format!("{error}\n  correct its spec, then convert it"),
    }
}

async fn convert_cluster(args: &ConvertArgs) -> anyhow::Result<()> {
    let client = client::connect(Arc::new(Telemetry::new())).await?;
    let definitions = ApiResource::erase::<CustomResourceDefinition>(&());
    let definitions = Api::<DynamicObject>::all_with(client.clone(), &definitions);
    let definition = definitions.get_opt(DEFINITION).await;
    let definition = definition.context("the cluster's definitions cannot be read")?;
    let Some(definition) = definition else {
        ui::say("this cluster has no InferenceDeployments: there is nothing to convert");
        return Ok(());
    };
    let kind = ApiResource::erase::<InferenceDeployment>(&());
    let all = match &args.namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &kind),
        None => Api::<DynamicObject>::all_with(client.clone(), &kind),
    };
    let objects = all.list(&ListParams::default()).await;
    let mut pending = Vec::new();
    let mut unreadable = 0;
    for object in objects.context("the InferenceDeployments cannot be listed")? {
        match Found::of(&serde_json::to_value(&object)?) {
            Ok(found) => {
                found.report(if args.dry_run { "would change " } else { "" });
                if !found.conversion.is_empty() {
                    pending.push(object);
                }
            }
            // Anybody's; the others are converted all the same.
            Err(error) => {
                ui::say(format_args!("{error:#}"));
                unreadable += 1;
            }
        }
    }
    if pending.is_empty() {
        ui::say("no InferenceDeployment has a deprecated field that can be converted");
    } else if args.dry_run {
        ui::say("--dry-run: nothing was changed");
    } else {
        update_definition(&definitions, &definition).await?;
        let unwritten = write_all(&client, &kind, &pending).await;
        ui::say(format_args!(
            "converted {}; run helm upgrade now: until then the operator writes no status\n  convert their manifests too: hearth convert -f FILE",
            pending.len() - unwritten
        ));
        if unwritten > 0 {
            bail!(
                "{unwritten} InferenceDeployments could not be converted: they keep their deprecated fields, which the operator still obeys\n  remove what refused them, then run hearth convert again"
            );
        }
    }
    match unreadable {
        0 => Ok(()),
        _ => bail!(
            "{unreadable} InferenceDeployments cannot be read\n  correct them, then run hearth convert again"
        ),
    }
}

/// Writes each object and reports those that are refused: a webhook, a policy or a missing right may keep this command from
/// one and not from the others. Returns how many were refused.
async fn write_all(client: &Client, kind: &ApiResource, objects: &[DynamicObject]) -> usize {
    let mut refused = 0;
    for object in objects {
        let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
        let api = Api::namespaced_with(client.clone(), namespace, kind);
        if let Err(error) = write(&api, object).await {
            ui::say(format_args!("{error:#}"));
            refused += 1;
        }
    }
    refused
}

/// Updates the cluster to this version's definition of the objects, on behalf of its current field managers.
async fn update_definition(
    definitions: &Api<DynamicObject>,
    current: &DynamicObject,
) -> anyhow::Result<()> {
    let wanted = crds()
        .into_iter()
        .find(|crd| crd.metadata.name.as_deref() == Some(DEFINITION));
    let wanted = serde_json::to_value(wanted.context("this program has no such definition")?)?;
    let versions = &wanted["spec"]["versions"];
    let spec_of =
        |versions: &Value| versions[0]["schema"]["openAPIV3Schema"]["properties"]["spec"].clone();
    let (there, here) = (
        spec_of(&current.data["spec"]["versions"]),
        spec_of(versions),
    );
    // Fields of the spec are never removed from the schema.
    if let Some(field) = unknown(&there, &here, "spec") {
        bail!(
            "the cluster's definition is newer than this program: it has {field}\n  run hearth convert of that version or a newer one"
        );
    }
    let change = json!({"spec": {"versions": versions}});
    let changed = patched(definitions, DEFINITION, &change, false).await;
    changed.context("the definition cannot be updated")?;
    give_back(definitions, DEFINITION, &managers_of(current)?).await
}

/// Returns the first field that `there` has and `here` lacks.
fn unknown(there: &Value, here: &Value, path: &str) -> Option<String> {
    let known = here["properties"].as_object();
    let properties = there["properties"].as_object();
    properties.into_iter().flatten().find_map(|(name, schema)| {
        let path = format!("{path}.{name}");
        match known.and_then(|known| known.get(name)) {
            Some(known) => unknown(schema, known, &path),
            None => Some(path),
        }
    })
}

/// Result of one attempt to write an object.
enum Attempt {
    /// Written, with its new fields.
    Written,
    /// The API server does not know the new fields yet.
    Behind,
    /// Somebody, such as the operator, has written the object in the meantime.
    Changed,
}

/// Writes one object as soon as the API server keeps its new fields, and again if somebody else writes it first.
async fn write(api: &Api<DynamicObject>, object: &DynamicObject) -> anyhow::Result<()> {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let mut object = object.clone();
    loop {
        let found = Found::of(&serde_json::to_value(&object)?)?;
        if found.conversion.is_empty() {
            return Ok(());
        }
        let shown = &found.name;
        let attempt = attempt(api, &object, &found).await;
        let problem = match attempt
            .with_context(|| format!("{shown} cannot be converted\n  run hearth convert again"))?
        {
            Attempt::Written => {
                let managers = found.conversion.managed_fields(&managers_of(&object)?);
                return give_back(api, name, &managers).await;
            }
            Attempt::Behind => "the API server does not serve the new definition yet",
            Attempt::Changed => "others keep writing it",
        };
        if tokio::time::Instant::now() > deadline {
            bail!("{shown} was not converted: {problem}\n  run hearth convert again");
        }
        tokio::time::sleep(PACE).await;
        object = match api.get_opt(name).await? {
            Some(object) => object,
            None => return Ok(()),
        };
    }
}

async fn attempt(
    api: &Api<DynamicObject>,
    object: &DynamicObject,
    found: &Found,
) -> anyhow::Result<Attempt> {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let change = json!({
        "metadata": {"resourceVersion": object.metadata.resource_version},
        "spec": found.conversion.patch,
    });
    for is_trial in [true, false] {
        let written = match patched(api, name, &change, is_trial).await {
            Err(error) if is_conflict(&error) => return Ok(Attempt::Changed),
            written => written?,
        };
        if keeps(&written, found) {
            continue;
        }
        if !is_trial {
            // One of several API servers was lagging behind.
            let undo = json!({
                "metadata": {"resourceVersion": written.metadata.resource_version},
                "spec": object.data["spec"],
            });
            let undone = patched(api, name, &undo, false).await;
            undone.with_context(|| {
                let lost = found.conversion.added.join(", ");
                format!("{} lost {lost}\n  write it again", found.name)
            })?;
        }
        return Ok(Attempt::Behind);
    }
    Ok(Attempt::Written)
}

fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

/// Whether an object has all the fields that a conversion adds.
fn keeps(object: &DynamicObject, found: &Found) -> bool {
    found.conversion.added.iter().all(|path| {
        let mut parts = path.split('.');
        parts
            .try_fold(&object.data, |value, part| value.get(part))
            .is_some()
    })
}

/// The entries of an object's `metadata.managedFields`.
fn managers_of(object: &DynamicObject) -> anyhow::Result<Vec<Value>> {
    let managers = serde_json::to_value(&object.metadata.managed_fields)?;
    Ok(managers.as_array().cloned().unwrap_or_default())
}

/// Returns field ownership to `managers`: an entry of this command would conflict with a later apply.
async fn give_back(api: &Api<DynamicObject>, name: &str, managers: &[Value]) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !managers.is_empty() {
        let current = api.get(name).await?;
        let change = json!({"metadata": {
            "resourceVersion": current.metadata.resource_version,
            "managedFields": returned(managers, &managers_of(&current)?),
        }});
        match patched(api, name, &change, false).await {
            Err(error) if is_conflict(&error) && tokio::time::Instant::now() < deadline => {}
            given => {
                given.with_context(|| {
                    format!("{name} was converted, and {MANAGER} owns fields of it\n  a later server-side apply of it may need --force-conflicts")
                })?;
                break;
            }
        }
    }
    Ok(())
}

/// Owners of an object's fields as they were `before` this command wrote, with what others have written since: the status,
/// and fields of managers that had none.
fn returned(before: &[Value], current: &[Value]) -> Vec<Value> {
    let owns_spec = |entry: &&Value| entry["subresource"].is_null();
    let is_same = |one: &Value, other: &Value| {
        one["manager"] == other["manager"] && one["operation"] == other["operation"]
    };
    let since = current.iter().filter(|entry| {
        let was_there = before
            .iter()
            .filter(owns_spec)
            .any(|other| is_same(entry, other));
        entry["manager"] != MANAGER && !(owns_spec(entry) && was_there)
    });
    before
        .iter()
        .filter(owns_spec)
        .chain(since)
        .cloned()
        .collect()
}

/// Applies a merge patch to an object; a trial run writes nothing.
async fn patched(
    api: &Api<DynamicObject>,
    name: &str,
    change: &Value,
    is_trial: bool,
) -> kube::Result<DynamicObject> {
    let parameters = PatchParams {
        dry_run: is_trial,
        field_manager: Some(MANAGER.to_owned()),
        ..PatchParams::default()
    };
    api.patch(name, &parameters, &Patch::Merge(change)).await
}

/// Applies a JSON merge patch (RFC 7396).
fn merge(target: &mut Value, patch: &Value) {
    let Some(changes) = patch.as_object() else {
        target.clone_from(patch);
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    for (name, change) in changes {
        match change {
            Value::Null => {
                if let Some(members) = target.as_object_mut() {
                    members.remove(name);
                }
            }
            change => merge(&mut target[name], change),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_removes_replaces_and_adds() {
        let mut object = json!({"a": {"b": 1, "c": 2}, "d": 3});
        merge(
            &mut object,
            &json!({"a": {"b": null}, "d": 4, "e": {"f": 5}}),
        );
        assert_eq!(object, json!({"a": {"c": 2}, "d": 4, "e": {"f": 5}}));
    }

    #[test]
    fn ownership_returns_and_what_was_written_since_stays() {
        let entry = |manager: &str, subresource: Option<&str>, field: &str| {
            let mut entry =
                json!({"manager": manager, "operation": "Apply", "fieldsV1": {field: {}}});
            if let Some(subresource) = subresource {
                entry["subresource"] = json!(subresource);
            }
            entry
        };
        let before = [
            entry("helm", None, "f:new"),
            entry("hearth", Some("status"), "f:old-status"),
        ];
        let current = [
            entry("helm", None, "f:rest"),
            entry("hearth", Some("status"), "f:new-status"),
            entry("ada", None, "f:label"),
            entry(MANAGER, None, "f:new"),
        ];
        let wanted = [before[0].clone(), current[1].clone(), current[2].clone()];
        assert_eq!(returned(&before, &current), wanted);
    }

    #[test]
    fn a_definition_that_knows_more_is_newer() {
        let schema = |names: &[&str]| {
            let members = names
                .iter()
                .map(|name| ((*name).to_owned(), json!({"type": "string"})));
            json!({"properties": {"model": {"properties": Value::Object(members.collect())}}})
        };
        let (old, new) = (schema(&["a"]), schema(&["a", "b"]));
        assert_eq!(unknown(&old, &new, "spec"), None);
        assert_eq!(unknown(&new, &old, "spec").as_deref(), Some("spec.model.b"));
    }
}
