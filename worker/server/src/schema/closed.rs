//! Closes objects that name their properties, so that they have no others.
//!
//! JSON Schema leaves an object with `properties` open, and a model that may invent further keys does. A schema that
//! names properties means only those, so such an object is closed here, unless the schema opens it itself with
//! `additionalProperties` or `patternProperties`. What `allOf`, `anyOf`, `oneOf` and `$ref` add to an object belongs
//! to it: it is closed around the names of all of them, including those in `required`.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

/// Members whose values hold schemas by name.
const MAPS: [&str; 2] = ["properties", "patternProperties"];
/// Members that hold schemas of something other than the object itself: one, or a list.
const BELOW: [&str; 5] = [
    "items",
    "prefixItems",
    "additionalItems",
    "additionalProperties",
    "contains",
];
/// Members of which one alternative must hold.
const CHOICES: [&str; 2] = ["anyOf", "oneOf"];
/// Members with which a schema itself says which other properties are allowed.
const OPENING: [&str; 4] = ["additionalProperties", "patternProperties", "enum", "const"];

/// Returns the schema with its objects closed. References lead to `$defs` of the result, which holds only what is
/// referred to. The schema must have passed [`super::Schemas::check`].
pub(crate) fn closed(schema: &Value) -> Value {
    let mut closing = Closing {
        root: schema,
        names: HashMap::new(),
        queue: Vec::new(),
    };
    let mut whole = closing.schema(schema);
    let mut definitions = Map::new();
    let mut next = 0;
    while let Some(definition) = closing.queue.get(next).copied() {
        let value = match definition.is_part {
            true => closing.part(definition.target),
            false => closing.schema(definition.target),
        };
        definitions.insert(name_of(next), value);
        next += 1;
    }
    if let Some(members) = whole.as_object_mut()
        && !definitions.is_empty()
    {
        members.insert("$defs".to_owned(), Value::Object(definitions));
    }
    whole
}

/// Target of a reference.
#[derive(Clone, Copy)]
struct Definition<'s> {
    target: &'s Value,
    /// Whether it is part of the object that refers to it, which is closed as a whole.
    is_part: bool,
}

struct Closing<'s> {
    root: &'s Value,
    /// Index of each definition in `queue`, by reference and whether it is a part.
    names: HashMap<(&'s str, bool), usize>,
    queue: Vec<Definition<'s>>,
}

/// Properties that a schema, and everything that holds together with it, names for an object.
#[derive(Default)]
struct Named<'s> {
    names: Vec<&'s str>,
    has_properties: bool,
    is_open: bool,
    /// Minimum number of properties.
    least: u64,
}

impl<'s> Closing<'s> {
    /// Closes a schema by itself, and everything within it.
    fn schema(&mut self, schema: &'s Value) -> Value {
        let Some(members) = schema.as_object() else {
            return schema.clone();
        };
        let mut own = Named::default();
        self.note(members, false, &mut own, &mut Vec::new());
        if own.names.is_empty() && !own.has_properties {
            // An alternative is an object by itself, and so is the target of a reference.
            return self.copy(members, false);
        }
        let is_alone = members.contains_key("$ref") && !has_object_members(members);
        if is_alone {
            return self.copy(members, false);
        }
        let mut all = Named::default();
        self.note(members, true, &mut all, &mut Vec::new());
        let mut copy = self.copy(members, true);
        let names: HashSet<&str> = all.names.iter().copied().collect();
        let is_closed = all.has_properties && !all.is_open && all.least <= names.len() as u64;
        if let (true, Some(members)) = (is_closed, copy.as_object_mut()) {
            let properties = members.entry("properties").or_insert_with(|| json!({}));
            if let Some(properties) = properties.as_object_mut() {
                for name in all.names {
                    properties.entry(name).or_insert_with(|| Value::Bool(true));
                }
            }
            members.insert("additionalProperties".to_owned(), Value::Bool(false));
        }
        copy
    }

    /// Copies a part of an object, which is closed where its parts come together.
    fn part(&mut self, schema: &'s Value) -> Value {
        match schema.as_object() {
            Some(members) => self.copy(members, true),
            None => schema.clone(),
        }
    }

    /// Copies a schema, closing everything below the object. `is_whole`: alternatives and references are its parts.
    fn copy(&mut self, members: &'s Map<String, Value>, is_whole: bool) -> Value {
        let mut copy = Map::new();
        for (word, value) in members {
            let word = word.as_str();
            let value = match value {
                Value::Object(named) if MAPS.contains(&word) => {
                    let closed = named
                        .iter()
                        .map(|(name, value)| (name.clone(), self.schema(value)));
                    Value::Object(closed.collect())
                }
                Value::Array(list) if BELOW.contains(&word) => {
                    list.iter().map(|value| self.schema(value)).collect()
                }
                Value::Object(_) if BELOW.contains(&word) => self.schema(value),
                Value::Array(list) if word == "allOf" => {
                    list.iter().map(|value| self.part(value)).collect()
                }
                Value::Array(list) if CHOICES.contains(&word) => match is_whole {
                    true => list.iter().map(|value| self.part(value)).collect(),
                    false => list.iter().map(|value| self.schema(value)).collect(),
                },
                Value::String(reference) if word == "$ref" => self.refer(reference, is_whole),
                _ if ["$defs", "definitions"].contains(&word) => continue,
                value => value.clone(),
            };
            copy.insert(word.to_owned(), value);
        }
        Value::Object(copy)
    }

    /// Returns the reference's location in the result.
    fn refer(&mut self, reference: &'s str, is_part: bool) -> Value {
        let Some(target) = self.resolve(reference) else {
            return Value::from(reference);
        };
        let number = *self.names.entry((reference, is_part)).or_insert_with(|| {
            self.queue.push(Definition { target, is_part });
            self.queue.len() - 1
        });
        Value::String(format!("#/$defs/{}", name_of(number)))
    }

    fn resolve(&self, reference: &str) -> Option<&'s Value> {
        self.root.pointer(reference.strip_prefix('#')?)
    }

    /// Adds what `members` say, including `allOf` and references, and all alternatives if `with_choices`. `seen` holds
    /// the references that led here.
    fn note(
        &self,
        members: &'s Map<String, Value>,
        with_choices: bool,
        named: &mut Named<'s>,
        seen: &mut Vec<&'s str>,
    ) {
        let text = |value: &'s Value| value.as_str();
        let required = members.get("required").and_then(Value::as_array);
        if let Some(properties) = members.get("properties").and_then(Value::as_object) {
            named.has_properties = true;
            named.names.extend(properties.keys().map(String::as_str));
        }
        named
            .names
            .extend(required.into_iter().flatten().filter_map(text));
        named.is_open |= OPENING.iter().any(|word| members.contains_key(*word));
        let least = members.get("minProperties").and_then(Value::as_u64);
        named.least = named.least.max(least.unwrap_or(0));
        let words = ["allOf"].into_iter();
        for word in words.chain(CHOICES.into_iter().filter(|_| with_choices)) {
            let list = members.get(word).and_then(Value::as_array);
            for part in list.into_iter().flatten().filter_map(Value::as_object) {
                self.note(part, with_choices, named, seen);
            }
        }
        if let Some(reference) = members.get("$ref").and_then(Value::as_str)
            && !seen.contains(&reference)
            && let Some(target) = self.resolve(reference).and_then(Value::as_object)
        {
            seen.push(reference);
            self.note(target, with_choices, named, seen);
        }
    }
}

/// Whether a schema says anything about an object besides its reference.
fn has_object_members(members: &Map<String, Value>) -> bool {
    ["properties", "required", "allOf", "anyOf", "oneOf"]
        .iter()
        .any(|word| members.contains_key(*word))
}

fn name_of(number: usize) -> String {
    format!("d{number}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn becomes(schema: Value, expected: Value) {
        assert_eq!(closed(&schema), expected);
    }

    #[test]
    fn an_object_that_names_its_properties_has_no_others_wherever_it_is() {
        becomes(
            json!({"type": "object", "properties": {"a": {"type": "array", "items": {"properties": {"b": {}}}}}}),
            json!({"type": "object", "properties": {"a": {"type": "array", "items":
                {"properties": {"b": {}}, "additionalProperties": false}}}, "additionalProperties": false}),
        );
        // A schema that names none allows any object.
        for open in [json!({"type": "object"}), json!({}), json!(true)] {
            becomes(open.clone(), open);
        }
    }

    #[test]
    fn what_the_schema_opens_stays_open() {
        for word in ["additionalProperties", "patternProperties"] {
            for value in [json!({"x-": {"type": "null"}}), json!({})] {
                let schema = json!({"properties": {"a": {}}, word: value});
                becomes(schema.clone(), schema);
            }
        }
        let opened = json!({"properties": {"a": {}}, "additionalProperties": true});
        becomes(opened.clone(), opened);
    }

    #[test]
    fn names_that_are_required_may_be_given() {
        becomes(
            json!({"properties": {"a": {}}, "required": ["a", "b"]}),
            json!({"properties": {"a": {}, "b": true}, "required": ["a", "b"], "additionalProperties": false}),
        );
        let unnamed = json!({"type": "object", "required": ["a"]});
        becomes(unnamed.clone(), unnamed);
    }

    #[test]
    fn an_object_of_several_schemas_is_closed_around_all_of_them() {
        let base = json!({"properties": {"id": {"type": "integer"}}});
        becomes(
            json!({"$defs": {"base": base}, "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"x": {}}}]}),
            json!({"allOf": [{"$ref": "#/$defs/d0"}, {"properties": {"x": {}}}],
                "properties": {"id": true, "x": true}, "additionalProperties": false, "$defs": {"d0": base}}),
        );
        // One of them opens it.
        let open = json!({"allOf": [{"properties": {"a": {}}}, {"additionalProperties": true}]});
        becomes(open.clone(), open);
        // The same definition is closed when it stands alone.
        let twice = closed(&json!({"$defs": {"base": base}, "properties": {
            "one": {"$ref": "#/$defs/base"}, "more": {"$ref": "#/$defs/base", "required": ["y"]}}}));
        assert_eq!(
            twice["$defs"]["d0"]["additionalProperties"],
            json!(false),
            "{twice}"
        );
        assert_eq!(twice["$defs"]["d1"], base);
        assert_eq!(
            twice["properties"]["more"]["properties"],
            json!({"y": true, "id": true})
        );
    }

    #[test]
    fn alternatives_are_closed_each_unless_they_add_to_an_object() {
        becomes(
            json!({"anyOf": [{"properties": {"a": {}}}, {"type": "null"}]}),
            json!({"anyOf": [{"properties": {"a": {}}, "additionalProperties": false}, {"type": "null"}]}),
        );
        becomes(
            json!({"properties": {"kind": {}}, "oneOf": [{"properties": {"a": {}}}, {"required": ["b"]}]}),
            json!({"properties": {"kind": {}, "a": true, "b": true}, "oneOf": [{"properties": {"a": {}}}, {"required": ["b"]}],
                "additionalProperties": false}),
        );
    }

    #[test]
    fn a_schema_that_leads_back_to_itself_ends() {
        let tree = json!({"properties": {"next": {"$ref": "#"}}});
        let closed = closed(&tree);
        assert_eq!(closed["properties"]["next"], json!({"$ref": "#/$defs/d0"}));
        assert_eq!(
            closed["$defs"]["d0"]["properties"]["next"],
            closed["properties"]["next"]
        );
        assert_eq!(closed["$defs"]["d0"]["additionalProperties"], json!(false));
    }
}
