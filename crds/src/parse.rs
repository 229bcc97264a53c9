//! Parsing of a file into a validated `InferenceDeployment`, with the errors that the API server would give.

use kube::core::cel::{ErrorKind, Validator};
use serde::Deserialize;
use serde_json::Value;

use crate::capability::{Target, unsupported};
use crate::error::FieldError;
use crate::meant;
use crate::offer::Offer;
use crate::rules;
use crate::structural;
use crate::{API_VERSION, InferenceDeployment};

/// The only kind of object that a file may hold.
const KIND: &str = "InferenceDeployment";

/// Errors of a file that does not hold a valid `InferenceDeployment`.
///
/// Displays without a leading `error:`; a second line gives the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// The text is not YAML.
    #[error("the file is not YAML: {0}\n  check the indentation and the colons at that place")]
    Yaml(String),
    /// The file has no document.
    #[error(
        "the file is empty\n  write an InferenceDeployment; manifests/examples/demo.yaml is a small one to begin with"
    )]
    Empty,
    /// More than one document.
    #[error(
        "the file has {count} documents ({kinds})\n  write one InferenceDeployment per file and no second '---'"
    )]
    MultipleDocuments {
        /// Number of documents.
        count: usize,
        /// Their kinds, in order.
        kinds: String,
    },
    /// Fields that are invalid; at least one.
    #[error("{}", join(.0))]
    Fields(Vec<FieldError>),
    /// The schema compiled into this program cannot be used.
    #[error(
        "the schema of this program is unusable: {0}\n  this is a fault of the program: report it with this line"
    )]
    Schema(String),
}

fn join(errors: &[FieldError]) -> String {
    errors
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("\nerror: ")
}

impl ParseError {
    /// The invalid fields; empty if parsing did not get that far.
    pub fn fields(&self) -> &[FieldError] {
        match self {
            Self::Fields(fields) => fields,
            Self::Yaml(_) | Self::Empty | Self::MultipleDocuments { .. } | Self::Schema(_) => &[],
        }
    }
}

/// Reads one `InferenceDeployment` and checks it as the API server would: structure, then CEL rules on the defaulted
/// object. Deprecated fields are translated.
///
/// # Errors
/// [`ParseError`]; all errors of one stage are reported together.
pub fn parse_deployment(yaml_text: &str) -> Result<InferenceDeployment, ParseError> {
    parse(yaml_text, None)
}

/// Like [`parse_deployment`], but also refuses every field that asks for something that this engine cannot do at
/// `target`. Messages suggest only what is accepted there.
///
/// # Errors
/// [`ParseError`].
pub fn parse_deployment_for(
    yaml_text: &str,
    target: Target,
) -> Result<InferenceDeployment, ParseError> {
    parse(yaml_text, Some(target))
}

fn parse(yaml_text: &str, target: Option<Target>) -> Result<InferenceDeployment, ParseError> {
    let object = one_document(yaml_text)?;
    let faults = check_header(&object)?;
    check_object(object, target, faults)
}

/// Checks a deployment that did not come from a file (the operator reads it from the API server) by the same rules.
///
/// # Errors
/// [`ParseError::Fields`] with all errors.
pub fn validate_deployment(
    deployment: &InferenceDeployment,
    target: Target,
) -> Result<(), ParseError> {
    let object =
        serde_json::to_value(deployment).map_err(|error| ParseError::Schema(error.to_string()))?;
    check_object(object, Some(target), Vec::new()).map(|_| ())
}

fn one_document(text: &str) -> Result<Value, ParseError> {
    let mut documents = Vec::new();
    for document in serde_norway::Deserializer::from_str(text) {
        // Through a YAML value first: it rejects a duplicate key, where JSON would keep the last.
        let value =
            serde_norway::Value::deserialize(document).map_err(|error| not_yaml(text, &error))?;
        if !value.is_null() {
            documents.push(
                serde_json::to_value(value).map_err(|error| ParseError::Yaml(error.to_string()))?,
            );
        }
    }
    match documents.len() {
        0 => Err(ParseError::Empty),
        1 => Ok(documents.remove(0)),
        count => {
            let kinds: Vec<&str> = documents
                .iter()
                .map(|document| document["kind"].as_str().unwrap_or("no kind"))
                .collect();
            Err(ParseError::MultipleDocuments {
                count,
                kinds: kinds.join(", "),
            })
        }
    }
}

/// Names the field of a duplicate key or of a number that no field can hold; otherwise keeps the parser's message.
fn not_yaml(text: &str, error: &serde_norway::Error) -> ParseError {
    let message = error.to_string();
    let twice = || {
        let (path, rest) = message.split_once("duplicate entry with key \"")?;
        let (key, _) = rest.split_once('"')?;
        let path = path.trim_end_matches(": ");
        let lines = error
            .location()
            .map(|at| lines_of(text, key, at.line(), at.column()))
            .filter(|lines| lines.len() > 1);
        let problem = match lines {
            Some(lines) => format!("is written twice, in lines {}", lines.join(" and ")),
            None => "is written twice".to_owned(),
        };
        let field = crate::offer::join(path, key);
        Some(FieldError::new(field, problem, "keep one of them"))
    };
    let too_large = || {
        let (path, rest) = message.split_once(": invalid type: integer `")?;
        let (number, _) = rest.split_once('`')?;
        let problem = format!("is {number}");
        Some(FieldError::new(
            path,
            problem,
            "no field holds so large a number: write a smaller one",
        ))
    };
    let tab = || {
        let is_tab = |line: &str| line.trim_start_matches(' ').starts_with('\t');
        let at = text.lines().position(is_tab)?;
        let line = format!("line {}", at + 1);
        Some(FieldError::new(
            line,
            "begins with a tab",
            "indent it with spaces: YAML allows no tabs there",
        ))
    };
    match twice().or_else(too_large).or_else(tab) {
        Some(fault) => ParseError::Fields(vec![fault]),
        None => ParseError::Yaml(message),
    }
}

/// Returns the 1-based numbers of the lines that begin with `key` in the mapping whose first key is at that line and
/// column.
fn lines_of(text: &str, key: &str, line: usize, column: usize) -> Vec<String> {
    let indent = column.saturating_sub(1);
    text.lines()
        .enumerate()
        .skip(line.saturating_sub(1))
        .map(|(index, line)| (index + 1, line, line.trim_start()))
        .filter(|(_, _, words)| !words.is_empty() && !words.starts_with('#'))
        // The first line may begin with a list's hyphen.
        .take_while(|(number, whole, words)| *number == line || whole.len() - words.len() >= indent)
        .filter(|(_, whole, _)| {
            let at_indent = whole.get(indent..).unwrap_or_default();
            let name = at_indent.split(':').next().unwrap_or_default();
            name.trim().trim_matches(['"', '\'']) == key
        })
        .map(|(number, ..)| number.to_string())
        .collect()
}

/// Returns the faults of the header.
///
/// # Errors
/// [`ParseError::Fields`] if the file holds another kind of object, whose fields are not those of a deployment.
fn check_header(object: &Value) -> Result<Vec<FieldError>, ParseError> {
    let mut errors = Vec::new();
    if !object.is_object() {
        let problem = FieldError::describe(Some(object));
        errors.push(FieldError::new(
            "the file",
            problem,
            format!(
                "write an object with apiVersion: {API_VERSION}, kind: {KIND}, metadata and spec"
            ),
        ));
        return Err(ParseError::Fields(errors));
    }
    let mut is_another = false;
    for (field, wanted) in [("apiVersion", API_VERSION), ("kind", KIND)] {
        if object[field].as_str() != Some(wanted) {
            is_another |= !object[field].is_null();
            let problem = FieldError::describe(object.get(field));
            errors.push(FieldError::new(
                field,
                problem,
                format!("write {field}: {wanted}"),
            ));
        }
    }
    let name = &object["metadata"]["name"];
    if name.as_str().is_none_or(str::is_empty) {
        let problem = FieldError::describe(Some(name));
        errors.push(FieldError::new(
            "metadata.name",
            problem,
            "write a name for the deployment, such as demo",
        ));
    }
    if let Some(namespace) = object["metadata"].get("namespace")
        && namespace.as_str().is_none_or(str::is_empty)
    {
        let problem = FieldError::describe(Some(namespace));
        errors.push(FieldError::new(
            "metadata.namespace",
            problem,
            "write a namespace, or remove the line",
        ));
    }
    match is_another {
        true => Err(ParseError::Fields(errors)),
        false => Ok(errors),
    }
}

/// Checks structure first, so that rules may rely on the types, and reports it with the `faults` of the header. Broken rules and
/// unsupported capabilities are reported together.
fn check_object(
    object: Value,
    target: Option<Target>,
    mut faults: Vec<FieldError>,
) -> Result<InferenceDeployment, ParseError> {
    let schema = crate::crd::deployment_schema().map_err(ParseError::Schema)?;
    let offer = Offer::at(target);
    faults.extend(structural::check(schema, &object, offer));
    if !faults.is_empty() {
        return Err(ParseError::Fields(faults));
    }
    let mut errors = broken_rules(schema, &object, offer)?;
    let deployment = match serde_json::from_value::<InferenceDeployment>(object) {
        Ok(deployment) => deployment,
        Err(_) if !errors.is_empty() => return Err(ParseError::Fields(errors)),
        Err(error) => {
            let fault = FieldError::new("spec", "cannot be read", error.to_string());
            return Err(ParseError::Fields(vec![fault]));
        }
    };
    if let Some(target) = target {
        let mut more = unsupported(&deployment.spec, target);
        // A field that breaks a rule has its remedy.
        more.retain(|fault| errors.iter().all(|error| error.field != fault.field));
        errors.extend(more);
    }
    if errors.is_empty() {
        let spec = deployment.spec.translated();
        Ok(InferenceDeployment { spec, ..deployment })
    } else {
        Err(ParseError::Fields(errors))
    }
}

/// Returns the CEL rules of `schema` that `object` breaks, in order of their fields.
fn broken_rules(
    schema: &Value,
    object: &Value,
    offer: Offer,
) -> Result<Vec<FieldError>, ParseError> {
    let rules = crate::crd::deployment_rules().map_err(ParseError::Schema)?;
    let Err(broken) = Validator::new().validate_compiled(rules, object, None) else {
        return Ok(Vec::new());
    };
    let mut broken = broken.into_vec();
    broken.sort_by(|a, b| a.field_path.cmp(&b.field_path));
    let refused: Vec<String> = broken
        .iter()
        .filter(|error| error.rule == rules::NEVER)
        .map(|error| error.field_path.clone())
        .collect();
    let mut errors: Vec<FieldError> = Vec::new();
    for error in &broken {
        if error.kind != ErrorKind::ValidationFailure {
            return Err(ParseError::Schema(format!(
                "{} at {}: {}",
                error.rule, error.field_path, error.message
            )));
        }
        // Advice on how to write a field that is refused anyway helps nobody.
        if error.rule != rules::NEVER && refused.contains(&error.field_path) {
            continue;
        }
        let field = if error.field_path.is_empty() {
            "metadata.name"
        } else {
            error.field_path.as_str()
        };
        // Rules on whole objects concern what is written, not defaults.
        let value = structural::lookup(object, field);
        let problem = FieldError::describe(value);
        let member = structural::schema_at(schema, field);
        let remedy = offer.narrow(&error.message, member, field);
        let remedy = match error.rule.as_str() {
            rules::NEVER => remedy,
            _ => meant::with_quantity(member, value, remedy),
        };
        let fault = FieldError::new(field, problem, remedy);
        if !errors.contains(&fault) {
            errors.push(fault);
        }
    }
    Ok(errors)
}
