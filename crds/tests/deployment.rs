//! Accepted files, and the wording of every refusal.
#![cfg(feature = "kube")]
#![allow(clippy::unwrap_used)]

use hearth_crds::{
    ParseError, Target, parse_deployment, parse_deployment_for, validate_deployment,
};

/// Builds a deployment with `spec` as its spec, each line already indented by two spaces.
fn deployment(spec: &str) -> String {
    format!(
        "apiVersion: hearth.dev/v1alpha1\nkind: InferenceDeployment\nmetadata: {{name: demo}}\nspec:\n{spec}"
    )
}

const MODEL: &str = "  model: {source: {builtin: {name: hearth-demo}}}\n";

#[track_caller]
fn refusal(text: &str) -> String {
    match parse_deployment(text) {
        Ok(_) => panic!("accepted:\n{text}"),
        Err(error) => error.to_string(),
    }
}

#[track_caller]
fn refused(spec: &str, expected: &str) {
    let message = refusal(&deployment(&format!("{MODEL}{spec}")));
    assert_eq!(message, expected);
}

#[test]
fn the_smallest_file_is_accepted_with_defaults() {
    let demo = parse_deployment(&deployment(MODEL)).unwrap();
    assert_eq!(demo.metadata.name.as_deref(), Some("demo"));
    assert_eq!(demo.spec.decode.max_batch, 6);
    assert_eq!(demo.spec.served_name(), "hearth-demo");
    assert_eq!(
        (
            demo.spec.prefill.planned_replicas(),
            demo.spec.decode.planned_replicas()
        ),
        (1, 1)
    );
    demo.validate_cel().unwrap();
    validate_deployment(&demo, Target::Machine).unwrap();
}

#[test]
fn every_field_of_the_design_is_read_and_what_the_engine_lacks_is_refused() {
    let text = deployment(
        r#"
  model:
    source: {huggingFace: {repo: Qwen/Qwen3-30B-A3B, revision: main, tokenSecretRef: {name: hub}}}
    servedName: Qwen/Qwen3-30B-A3B
    contextLength: 16384
    quantization: W4A8
    adapters: [{name: poems, source: {http: {url: https://nas.lan/poems.tar, sha256: "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}}}]
  strategy: Interleaved
  prefill: {scaling: {mode: External}, gpusPerWorker: 2, quietWindow: 2m}
  decode:
    scaling: {mode: External, minReplicas: 2, maxReplicas: 4}
    maxBatch: 8
    dualBatch: "On"
    kvCache: {keyType: Int8, valueType: FP8, memory: 11.5Gi, spill: {path: /var/kv, size: 64Gi}}
  placement:
    nodeSelector: {disk: fast}
    tolerations: [{key: gpu, operator: Exists, effect: NoSchedule}]
    numa: Compact
    pinning: Exclusive
  objectives: {timeToFirstToken: 30s, timePerOutputToken: 50ms}
  autoscaling: {scaleToZeroAfter: 15m, scaleDownStabilization: 5m}
  endpoint: {type: LoadBalancer, apiKeysSecretRef: {name: keys}, gateway: {name: public, namespace: infra}}
"#,
    );
    let object: serde_json::Value = serde_norway::from_str(&text).unwrap();
    let spec: hearth_crds::InferenceDeploymentSpec =
        serde_json::from_value(object["spec"].clone()).unwrap();
    assert_eq!(spec.decode.kv_cache.memory.unwrap().bytes(), 23 << 29);
    assert_eq!(
        spec.objectives
            .time_per_output_token
            .unwrap()
            .as_millis_f64(),
        50.0
    );
    assert_eq!(spec.decode.planned_replicas(), 2);
    let round: hearth_crds::InferenceDeploymentSpec =
        serde_json::from_str(&serde_json::to_string(&spec).unwrap()).unwrap();
    assert_eq!(round, spec);

    // Each field that this engine lacks is refused by name; nothing is ignored.
    let fields: Vec<String> = match parse_deployment_for(&text, Target::Machine) {
        Err(ParseError::Fields(fields)) => fields.into_iter().map(|field| field.field).collect(),
        other => panic!("{other:?}"),
    };
    for field in [
        "spec.model.quantization",
        "spec.model.adapters",
        "spec.strategy",
        "spec.prefill.gpusPerWorker",
        "spec.prefill.scaling.mode",
        "spec.decode.scaling.mode",
        "spec.decode.kvCache.keyType",
        "spec.decode.kvCache.valueType",
        "spec.decode.kvCache.spill",
        "spec.autoscaling.scaleToZeroAfter",
        "spec.autoscaling.scaleDownStabilization",
        "spec.endpoint.gateway",
        "spec.endpoint.type",
        "spec.endpoint.apiKeysSecretRef",
        "spec.placement.nodeSelector",
    ] {
        assert!(
            fields.iter().any(|named| named == field),
            "{field} is not refused: {fields:?}"
        );
    }
}

#[test]
fn numbers_out_of_range_say_what_to_write() {
    refused(
        "  decode: {maxBatch: 0}",
        "spec.decode.maxBatch is 0\n  at least 1 stream must be able to decode, at most 512; the default is 6",
    );
    refused(
        "  decode: {maxBatch: 513}",
        "spec.decode.maxBatch is 513\n  at least 1 stream must be able to decode, at most 512; the default is 6",
    );
    refused(
        "  decode: {replicas: 0}",
        "spec.decode.replicas is 0\n  write 1 to 64 workers; the default is 1, and 0 takes scaling: {mode: External, minReplicas: 0}, with which an autoscaler ends all workers and starts them again",
    );
    refused(
        "  prefill: {replicas: 2, mode: Chunked}",
        "spec.prefill sets replicas and mode\n  remove replicas and scaling, or write another mode: with mode Chunked the decode workers read the prompts",
    );
    let short =
        deployment("  model: {source: {builtin: {name: hearth-demo}}, contextLength: 15}\n");
    assert_eq!(
        refusal(&short),
        "spec.model.contextLength is 15\n  write a context of 16 to 16777216 tokens, or leave it out for the model's own, at most 8192"
    );
}

#[test]
fn sources_are_exactly_one_and_well_formed() {
    let source = |text: &str| refusal(&deployment(&format!("  model: {{source: {text}}}\n")));
    assert!(source("{}").starts_with(
        "spec.model.source is empty\n  write exactly one of builtin, huggingFace, persistentVolumeClaim,"
    ));
    assert!(
        source("{builtin: {name: hearth-demo}, hostPath: {path: /m}}")
            .starts_with("spec.model.source sets builtin and hostPath\n  write exactly one of")
    );
    assert_eq!(
        source("{hostPath: {path: models/qwen3}}"),
        "spec.model.source.hostPath.path is \"models/qwen3\"\n  write the absolute path of the model's directory, such as /models/qwen3-30b-a3b, without .."
    );
    assert!(source("{hostPath: {path: /models/../etc}}").contains("without .."));
    for repo in [
        "Qwen3",
        "https://hub/Qwen/Qwen3",
        "Qwen/Qwen3@main",
        "../Qwen3",
        "Qwen/..",
    ] {
        assert!(
            source(&format!("{{huggingFace: {{repo: {repo:?}}}}}")).starts_with(&format!(
                "spec.model.source.huggingFace.repo is {repo:?}\n  write the repository as owner/name"
            ))
        );
    }
    assert!(
        source("{huggingFace: {repo: Qwen/Qwen3, revision: ../main}}").starts_with(
            "spec.model.source.huggingFace.revision is \"../main\"\n  write a branch, tag or commit"
        )
    );
    let hub = "  model: {source: {huggingFace: {repo: Qwen/Qwen3, revision: refs/pr/1, tokenSecretRef: {name: hub}}}}\n";
    for target in [Target::Machine, Target::Cluster] {
        parse_deployment_for(&deployment(hub), target).unwrap();
    }
    assert!(
        source("{http: {url: ftp://x/y, sha256: abc}}")
            .contains("spec.model.source.http.sha256 is \"abc\"")
    );
    let unknown = parse_deployment_for(
        &deployment("  model: {source: {builtin: {name: nope}}}\n"),
        Target::Machine,
    );
    assert_eq!(
        unknown.unwrap_err().to_string(),
        "spec.model.source.builtin.name is \"nope\"\n  the models that come with Hearth are: hearth-demo"
    );
}

#[test]
fn texts_of_amounts_are_checked() {
    refused(
        "  decode: {kvCache: {memory: 64MiB}}",
        "spec.decode.kvCache.memory is \"64MiB\"\n  did you mean 64Mi? Write an amount of memory as a number and Ki, Mi, Gi or Ti, such as 512Mi or 11.5Gi",
    );
    refused(
        "  objectives: {timeToFirstToken: 30 seconds}",
        "spec.objectives.timeToFirstToken is \"30 seconds\"\n  did you mean 30s? Write a duration as a number and ms, s, m or h, such as 50ms, 30s or 1m30s",
    );
    refused(
        "  decode: {kvCache: {memory: 64}}",
        "spec.decode.kvCache.memory is 64\n  write an amount of memory as a number and Ki, Mi, Gi or Ti, such as 512Mi or 11.5Gi",
    );
    refused(
        "  objectives: {timePerOutputToken: 50}",
        "spec.objectives.timePerOutputToken is 50\n  did you mean 50s? Write a duration as a number and ms, s, m or h, such as 50ms, 30s or 1m30s",
    );
    // The rule and the parser agree on every text.
    for memory in [
        "1",
        "1.5Gi",
        "64Mi",
        "",
        "1.Gi",
        "1e3",
        "-1",
        "1 Gi",
        "999999999999999Ti",
        "1K",
    ] {
        let text = deployment(&format!(
            "{MODEL}  decode: {{kvCache: {{memory: \"{memory}\"}}}}"
        ));
        assert_eq!(
            parse_deployment(&text).is_ok(),
            memory.parse::<hearth_crds::MemoryQuantity>().is_ok(),
            "{memory:?}"
        );
    }
}

#[test]
fn shapes_are_checked_before_rules() {
    refused(
        "  decode: {maxbatch: 4}",
        "spec.decode.maxbatch is not a field of spec.decode\n  did you mean maxBatch? The fields are dualBatch, expertCache, kvCache, maxBatch, replicas, scaling",
    );
    refused(
        "  decode: {maxBatch: many}",
        "spec.decode.maxBatch is \"many\"\n  write a whole number",
    );
    refused(
        "  decode: {maxBatch: 2.5}",
        "spec.decode.maxBatch is 2.5\n  write a whole number",
    );
    refused(
        "  decode: {maxBatch: '4'}",
        "spec.decode.maxBatch is \"4\"\n  write a whole number without quotes",
    );
    refused(
        "  strategy: Fast",
        "spec.strategy is \"Fast\"\n  write one of Auto, Hybrid, PipedRing",
    );
    refused(
        "  decode:",
        "spec.decode has no value\n  write a value after the colon, or remove the line",
    );
    assert_eq!(
        refusal(&deployment("  model: {}\n")),
        "spec.model.source is missing\n  write it: source of the model's files: exactly one of builtin, huggingFace, persistentVolumeClaim, hostPath, http"
    );
    refused(
        "  placement: {nodeSelector: {disk: 1}}",
        "spec.placement.nodeSelector.disk is 1\n  write a string; put it in quotes if it looks like a number or like yes, no, on, off",
    );
    let missing = refusal(&deployment("  strategy: Auto\n"));
    assert_eq!(
        missing,
        "spec.model is missing\n  write it: the model and how it is offered"
    );
    refused(
        "  decode: {maxBatch: -1}",
        "spec.decode.maxBatch is -1\n  at least 1 stream must be able to decode, at most 512; the default is 6",
    );
    refused(
        "  decode: {maxBatch: 99999999999}",
        "spec.decode.maxBatch is 99999999999\n  at least 1 stream must be able to decode, at most 512; the default is 6",
    );
}

#[test]
fn headers_are_checked_first() {
    assert_eq!(
        refusal("apiVersion: hearth.dev/v1\nkind: Deployment\nmetadata: {}\nspec: {}\n"),
        "apiVersion is \"hearth.dev/v1\"\n  write apiVersion: hearth.dev/v1alpha1\nerror: kind is \"Deployment\"\n  write kind: InferenceDeployment\nerror: metadata.name is missing\n  write a name for the deployment, such as demo"
    );
    let text = deployment(MODEL).replace("name: demo", "name: Demo_1");
    assert!(refusal(&text).starts_with(
        "metadata.name is \"Demo_1\"\n  write a metadata.name of at most 40 lower-case"
    ));
    assert!(refusal("").starts_with("the file is empty"));
    assert!(refusal("# nothing\n").starts_with("the file is empty"));
    assert!(refusal("hello").starts_with("the file is \"hello\""));
    assert!(refusal("a: [1\nb: 2").starts_with("the file is not YAML: "));
    assert_eq!(
        refusal("a:\n  b: 1\n\tc: 2"),
        "line 3 begins with a tab\n  indent it with spaces: YAML allows no tabs there"
    );
    let twice = deployment(&format!("{MODEL}{MODEL}"));
    assert!(
        refusal(&twice).contains("is written twice, in lines "),
        "{}",
        refusal(&twice)
    );
    let twice = format!(
        "{}  decode: {{maxBatch: 1, maxBatch: 2}}\n",
        deployment(MODEL)
    );
    assert_eq!(
        refusal(&twice),
        "spec.decode.maxBatch is written twice\n  keep one of them"
    );
    let two = format!("{}\n---\nkind: Service\n", deployment(MODEL));
    assert_eq!(
        refusal(&two),
        "the file has 2 documents (InferenceDeployment, Service)\n  write one InferenceDeployment per file and no second '---'"
    );
    assert!(
        parse_deployment(&format!("---\n{}\n---\n", deployment(MODEL))).is_ok(),
        "an empty document is no document"
    );
    let no_spec =
        "apiVersion: hearth.dev/v1alpha1\nkind: InferenceDeployment\nmetadata: {name: demo}\n";
    assert!(
        refusal(no_spec).starts_with("spec is missing"),
        "{}",
        refusal(no_spec)
    );
}

#[test]
fn several_faults_come_together() {
    let text = deployment(&format!("{MODEL}  decode: {{maxBatch: 0, replicas: 65}}\n"));
    let ParseError::Fields(fields) = parse_deployment(&text).unwrap_err() else {
        panic!()
    };
    let names: Vec<&str> = fields.iter().map(|field| field.field.as_str()).collect();
    assert_eq!(names, ["spec.decode.maxBatch", "spec.decode.replicas"]);
}

#[test]
fn unknown_fields_are_all_named_with_the_field_that_was_meant() {
    let text = format!(
        "apiVersion: hearth.dev/v1alpha1\nkind: InferenceDeployment\nmetadata: {{nam: demo, label: {{a: b}}}}\nspecs: {{}}\nspec:\n{MODEL}  decod: {{}}\n  decode: {{maxbatch: 4, kvCache: {{memry: 1Gi}}}}\n  placement: {{tolerations: [{{keys: gpu}}]}}\n"
    );
    let ParseError::Fields(fields) = parse_deployment(&text).unwrap_err() else {
        panic!()
    };
    let mut unknown: Vec<(&str, &str)> = fields
        .iter()
        .filter(|field| field.problem.starts_with("is not a field of "))
        .map(|field| {
            let meant = field.remedy.strip_prefix("did you mean ");
            let meant = meant.and_then(|remedy| remedy.split_once('?'));
            (&*field.field, meant.map_or("", |(meant, _)| meant))
        })
        .collect();
    unknown.sort_unstable();
    assert_eq!(
        unknown,
        [
            ("metadata.label", "labels"),
            ("metadata.nam", "name"),
            ("spec.decod", "decode"),
            ("spec.decode.kvCache.memry", "memory"),
            ("spec.decode.maxbatch", "maxBatch"),
            ("spec.placement.tolerations[0].keys", "key"),
            ("specs", "spec"),
        ]
    );
    // The name that is missing for it, too.
    assert!(refusal(&text).starts_with("metadata.name is missing\n"));
    // A misspelt header hides nothing; another kind of object has other fields.
    let misspelt = deployment(&format!("{MODEL}  decod: {{}}\n")).replace("kind", "kin");
    let said = refusal(&misspelt);
    for part in ["kind is missing", "kin is not a field", "spec.decod is not"] {
        assert!(said.contains(part), "{said}");
    }
    let other = deployment("  replica: 1\n").replace("InferenceDeployment", "Deployment");
    assert!(
        !refusal(&other).contains("not a field"),
        "{}",
        refusal(&other)
    );
    // What the API server writes is taken.
    let read = deployment(MODEL).replace("{name: demo}", "{name: demo, uid: a, generation: 2}");
    parse_deployment(&read).unwrap();
}

#[test]
fn a_plan_is_immutable() {
    let plan: hearth_crds::InferencePlanSpec = serde_json::from_value(serde_json::json!({
        "generation": 1, "deployment": {"name": "demo", "namespace": "default"}, "strategy": "Hybrid",
        "model": {"servedName": "m", "path": "/m", "source": "hostPath /m", "architecture": "llama", "parameterCount": 1,
                  "weightBytes": 2, "contextLength": 16, "layers": 1, "kvBytesPerToken": 4, "dtype": "BF16"},
        "ranks": [], "routing": {"chunkedBelowTokens": 32, "maxQueue": 8, "queueTimeoutMs": 1000},
        "predicted": {"ttftMs": 1.0, "ttftPromptTokens": 64, "tpotMs": 1.0, "tokensPerSecond": 1.0},
        "why": [], "notChosen": []
    }))
    .unwrap();
    let old = hearth_crds::InferencePlan::new("demo-1", plan.clone());
    let mut new = old.clone();
    assert!(kube::core::cel::validate_cel_update(&new, &old).is_ok());
    new.spec.generation = 2;
    let error = kube::core::cel::validate_cel_update(&new, &old).unwrap_err();
    assert!(
        error.to_string().contains("a plan never changes"),
        "{error}"
    );
}

#[test]
fn what_was_meant_is_asked() {
    for (spec, question) in [
        (
            "  decode: {kvCache: {memory: 4GB}}\n",
            "spec.decode.kvCache.memory is \"4GB\"\n  did you mean 4Gi? Write an amount of memory",
        ),
        (
            "  objectives: {timeToFirstToken: 30 sec}\n",
            "spec.objectives.timeToFirstToken is \"30 sec\"\n  did you mean 30s? Write a duration",
        ),
        (
            "  objectives: {timeToFirstToken: 30}\n",
            "spec.objectives.timeToFirstToken is 30\n  did you mean 30s? Write a duration",
        ),
        (
            "  placement: {pinning: exclusive}\n",
            "spec.placement.pinning is \"exclusive\"\n  did you mean Exclusive? Write one of Exclusive, Shared, None",
        ),
        (
            "  strategy: hybrit\n",
            "spec.strategy is \"hybrit\"\n  did you mean Hybrid? Write one of ",
        ),
        (
            "  decode: {kvCache: {memory: much}}\n",
            "spec.decode.kvCache.memory is \"much\"\n  write an amount of memory",
        ),
    ] {
        let said = refusal(&deployment(&format!("{MODEL}{spec}")));
        assert!(said.starts_with(question), "{said}");
    }
}

#[test]
fn peers_are_one_group_of_2_to_8_gpus() {
    let mode = "mode: DistributedStreamLoading";
    for accepted in [
        mode.to_owned(),
        format!("{mode}, gpusPerWorker: 3, replicas: 1"),
        format!("{mode}, gpusPerWorker: 8"),
        format!("{mode}, scaling: {{mode: Static}}"),
        "quietWindow: 0s".to_owned(),
        "mode: Auto, quietWindow: 24h".to_owned(),
        "mode: DistributedStreamLoading, quietWindow: 1m".to_owned(),
    ] {
        let text = deployment(&format!("{MODEL}\n  prefill: {{{accepted}}}"));
        for target in [Target::Machine, Target::Cluster] {
            parse_deployment_for(&text, target).unwrap();
        }
    }
    for number in [0, 1, 9] {
        refused(
            &format!("  prefill: {{{mode}, gpusPerWorker: {number}}}"),
            &format!(
                "spec.prefill.gpusPerWorker is {number}\n  with mode DistributedStreamLoading gpusPerWorker is the number of GPUs that read a prompt together: write 2 to 8, or remove it"
            ),
        );
    }
    refused(
        &format!("  prefill: {{{mode}, replicas: 2}}"),
        "spec.prefill.replicas is 2\n  with mode DistributedStreamLoading all prefill workers read one prompt together: write replicas: 1 or remove it, and set the number of GPUs by gpusPerWorker",
    );
    for scaling in ["External", "Auto"] {
        refused(
            &format!("  prefill: {{{mode}, scaling: {{mode: {scaling}}}}}"),
            "spec.prefill.scaling sets mode\n  with mode DistributedStreamLoading all prefill workers read one prompt together, and none can be added by itself: remove scaling, or write mode: StreamLoading",
        );
    }
    for other in ["StreamLoading", "Chunked"] {
        refused(
            &format!("  prefill: {{mode: {other}, quietWindow: 1m}}"),
            "spec.prefill.quietWindow is \"1m\"\n  quietWindow says when several GPUs read a prompt together, and with this mode they never do: remove quietWindow, or write mode: Auto or DistributedStreamLoading",
        );
    }
    for long in ["25h", "23h61m", "999999999h"] {
        refused(
            &format!("  prefill: {{quietWindow: {long}}}"),
            &format!(
                "spec.prefill.quietWindow is \"{long}\"\n  write 0s to 24h; the default is 5m with mode Auto and 0s with DistributedStreamLoading"
            ),
        );
    }
    refused(
        "  prefill: {quietWindow: soon}",
        "spec.prefill.quietWindow is \"soon\"\n  write a duration as a number and ms, s, m or h, such as 50ms, 30s or 1m30s",
    );
}

#[test]
fn what_the_engine_lacks_is_refused_in_the_same_words_at_either_target() {
    for (path, value, words) in [
        (
            "model.quantization",
            "W8A8",
            "spec.model.quantization is \"W8A8\"\n  this engine runs weights as the checkpoint has them: write Native, and choose a checkpoint in FP8 for less memory",
        ),
        (
            "model.adapters",
            "[{name: a, source: {hostPath: {path: /a}}}]",
            "spec.model.adapters is a list of 1 item\n  this engine does not run LoRA adapters: remove them, or merge them into the checkpoint",
        ),
        (
            "strategy",
            "Interleaved",
            "spec.strategy is \"Interleaved\"\n  this engine has no interleaved pipeline: write Auto, Hybrid or PipedRing",
        ),
        (
            "decode.kvCache.keyType",
            "Int8",
            "spec.decode.kvCache.keyType is \"Int8\"\n  this engine keeps keys and values in BF16 or F32: write one of these",
        ),
        (
            "decode.kvCache.valueType",
            "FP8",
            "spec.decode.kvCache.valueType is \"FP8\"\n  this engine keeps keys and values in BF16 or F32: write one of these",
        ),
        (
            "decode.kvCache.spill",
            "{path: /var/kv, size: 1Gi}",
            "spec.decode.kvCache.spill sets path and size\n  this engine keeps the KV cache in memory: remove spill, and lower contextLength or maxBatch if memory is short",
        ),
        (
            "autoscaling.scaleDownStabilization",
            "soon",
            "spec.autoscaling.scaleDownStabilization is \"soon\"\n  pools with scaling.mode Auto shrink once fewer workers have sufficed for as long as one takes to start, 1 to 5 minutes: remove scaleDownStabilization",
        ),
        (
            "endpoint.gateway",
            "{name: public}",
            "spec.endpoint.gateway sets name\n  this engine does not attach routes to a Gateway: remove it and use the endpoint directly",
        ),
    ] {
        let mut object: serde_json::Value = serde_norway::from_str(&deployment(MODEL)).unwrap();
        let place = path
            .split('.')
            .fold(&mut object["spec"], |node, part| &mut node[part]);
        *place = serde_norway::from_str(value).unwrap();
        let text = object.to_string();
        assert_eq!(refusal(&text), words);
        for target in [Target::Machine, Target::Cluster] {
            let error = parse_deployment_for(&text, target).unwrap_err();
            assert_eq!(error.to_string(), words, "{target:?}");
        }
    }
}

#[test]
fn every_model_that_comes_with_hearth_is_admitted() {
    for name in hearth_crds::BUILTIN_MODELS {
        let model = format!("  model: {{source: {{builtin: {{name: {name}}}}}}}\n");
        assert!(parse_deployment(&deployment(&model)).is_ok(), "{name}");
    }
}
