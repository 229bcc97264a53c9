//! A ring of three ranks over the demo model.

use serde_json::{Value, json};

use crate::Ranks;

/// Role, name and windows (first layer and number) of each member, the head first: the demo has 4 layers, in two rounds.
pub const RING_MEMBERS: [(&str, &str, &[[u32; 2]]); 3] = [
    ("decode", "decode-0", &[[0, 1], [3, 1]]),
    ("stage", "stage-0", &[[1, 1]]),
    ("stage", "stage-1", &[[2, 1]]),
];

impl Ranks {
    /// Returns a plan whose only ranks are the ring's members, at these addresses.
    ///
    /// # Panics
    /// When the plan has no decode rank.
    pub fn ring_plan(&self, endpoints: &[String; 3]) -> Value {
        let mut plan = self.plan_of("decode", "decode-0", &endpoints[0]);
        let template = plan["ranks"][0].clone();
        plan["strategy"] = json!("PipedRing");
        let of = |place: usize| {
            let (role, name, windows) = RING_MEMBERS[place];
            let windows = windows.iter();
            let windows =
                windows.map(|[first, layers]| json!({"firstLayer": first, "layers": layers}));
            let mut rank = template.clone();
            rank["name"] = json!(name);
            rank["role"] = json!(if role == "decode" { "Decode" } else { "Stage" });
            rank["index"] = json!(place.saturating_sub(1));
            rank["endpoint"] = json!(endpoints[place]);
            rank["ring"] = json!({
                "head": "decode-0", "place": place, "windows": windows.collect::<Vec<_>>(),
            });
            rank
        };
        plan["ranks"] = (0..RING_MEMBERS.len()).map(of).collect();
        plan
    }
}
