//! The custom resource definitions as the API server takes them, and their YAML.

use std::sync::OnceLock;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt;
use kube::core::cel::{CompiledSchema, compile_schema};

use crate::{InferenceDeployment, InferencePlan, InferencePoolScaler, NodeProfile};

/// The definitions of all resources, in the order InferenceDeployment, InferencePlan, NodeProfile, InferencePoolScaler.
///
/// Use these rather than `InferenceDeployment::crd()`: they replace number formats that the API server does not know
/// (it would warn about each), do not allow `null` for optional fields, and state the bounds of CEL rules natively
/// too.
pub fn crds() -> Vec<CustomResourceDefinition> {
    let mut crds = vec![
        InferenceDeployment::crd(),
        InferencePlan::crd(),
        NodeProfile::crd(),
        InferencePoolScaler::crd(),
    ];
    for crd in &mut crds {
        for version in &mut crd.spec.versions {
            if let Some(schema) = version
                .schema
                .as_mut()
                .and_then(|s| s.open_api_v3_schema.as_mut())
            {
                tidy(schema);
            }
        }
    }
    crds
}

fn tidy(schema: &mut JSONSchemaProps) {
    if matches!(
        schema.format.as_deref(),
        Some("uint8" | "uint16" | "uint32" | "uint64" | "uint")
    ) {
        schema.format = Some("int64".to_owned());
    }
    schema.nullable = None;
    crate::bounds::write(schema);
    for property in schema
        .properties
        .iter_mut()
        .flat_map(|properties| properties.values_mut())
    {
        tidy(property);
    }
    match &mut schema.items {
        Some(JSONSchemaPropsOrArray::Schema(item)) => tidy(item),
        Some(JSONSchemaPropsOrArray::Schemas(items)) => items.iter_mut().for_each(tidy),
        None => {}
    }
    if let Some(JSONSchemaPropsOrBool::Schema(value)) = &mut schema.additional_properties {
        tidy(value);
    }
}

/// File name and YAML text of each definition, as checked in under `crds/yaml/`.
///
/// # Errors
/// If a definition does not serialize, which the tests rule out.
pub fn crd_yaml_files() -> Result<Vec<(String, String)>, serde_norway::Error> {
    crds()
        .iter()
        .map(|crd| {
            let text = quote_old_booleans(&serde_norway::to_string(crd)?);
            Ok((
                format!("{}.yaml", crd.spec.names.plural),
                format!("# Printed by `hearth crd`.\n{text}"),
            ))
        })
        .collect()
}

/// Quotes plain `On`, `Off` and the like: kubectl reads YAML 1.1, where they are booleans.
fn quote_old_booleans(yaml: &str) -> String {
    const OLD: [&str; 8] = ["y", "n", "yes", "no", "on", "off", "Y", "N"];
    let is_old =
        |scalar: &str| OLD.contains(&scalar) || OLD.contains(&scalar.to_lowercase().as_str());
    let mut text = String::with_capacity(yaml.len());
    for line in yaml.lines() {
        match line.rsplit_once(' ') {
            Some((head, scalar)) if head.ends_with(['-', ':']) && is_old(scalar) => {
                text.push_str(&format!("{head} \"{scalar}\""));
            }
            _ => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

/// All definitions as one YAML stream, ready for `kubectl apply -f -`.
///
/// # Errors
/// If a definition does not serialize, which the tests rule out.
pub fn crd_yaml() -> Result<String, serde_norway::Error> {
    let files = crd_yaml_files()?;
    Ok(files
        .into_iter()
        .map(|(_, text)| text)
        .collect::<Vec<_>>()
        .join("---\n"))
}

/// The OpenAPI schema of an InferenceDeployment, built once.
pub(crate) fn deployment_schema() -> Result<&'static serde_json::Value, String> {
    static SCHEMA: OnceLock<Result<serde_json::Value, String>> = OnceLock::new();
    SCHEMA
        .get_or_init(|| {
            let crds = crds();
            let schema = crds
                .first()
                .and_then(|crd| crd.spec.versions.first())
                .and_then(|version| version.schema.as_ref()?.open_api_v3_schema.as_ref())
                .ok_or("the definition has no schema")?;
            serde_json::to_value(schema).map_err(|error| error.to_string())
        })
        .as_ref()
        .map_err(Clone::clone)
}

/// The CEL rules of that schema, compiled once.
pub(crate) fn deployment_rules() -> Result<&'static CompiledSchema, String> {
    static RULES: OnceLock<CompiledSchema> = OnceLock::new();
    let schema = deployment_schema()?;
    Ok(RULES.get_or_init(|| compile_schema(schema)))
}
