//! Rings over the demo model.

use serde_json::{Value, json};

use crate::Ranks;

/// Role, name and windows (first layer and number) of a member. The demo has 4 layers.
pub type RingMember = (&'static str, &'static str, &'static [[u32; 2]]);

/// Three members, the head first, and two rounds.
pub const RING_MEMBERS: [RingMember; 3] = [
    ("decode", "decode-0", &[[0, 1], [3, 1]]),
    ("stage", "stage-0", &[[1, 1]]),
    ("stage", "stage-1", &[[2, 1]]),
];

impl Ranks {
    /// Returns a plan whose only ranks are [`RING_MEMBERS`], at these addresses.
    ///
    /// # Panics
    /// When the plan has no decode rank.
    pub fn ring_plan(&self, endpoints: &[String; 3]) -> Value {
        self.ring_plan_of(&RING_MEMBERS, endpoints)
    }

    /// Returns a plan whose only ranks are these members, at as many addresses.
    ///
    /// # Panics
    /// When the plan has no decode rank, or addresses are missing.
    pub fn ring_plan_of(&self, members: &[RingMember], endpoints: &[String]) -> Value {
        let mut plan = self.plan_of("decode", "decode-0", &endpoints[0]);
        let template = plan["ranks"][0].clone();
        plan["strategy"] = json!("PipedRing");
        let of = |place: usize| {
            let (role, name, windows) = members[place];
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
        plan["ranks"] = (0..members.len()).map(of).collect();
        plan
    }
}
