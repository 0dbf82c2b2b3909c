//! Where on a node a Pod's containers go: a pure function of what the node has free and what the Pod asks for.

use std::{
    cmp::{Ordering, Reverse},
    collections::BTreeMap,
    sync::Arc,
};

use gpufence_grant::{GpuReference, Share};

use crate::{
    device::{Device, NodeState, Use, Uses},
    policy::{Choosing, Packing, Unit},
    reason::{self, Refusal},
    request::{Claim, Memory, PodRequest, Role, What},
};

/// How many ways are tried for one Pod on one node, before it counts as not fitting.
const MAX_STEPS: u32 = 2000;
/// How many sets of GPUs are tried for one container that wants several.
const MAX_SETS: usize = 24;

/// Where a Pod's containers go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The shares of each container.
    pub containers: BTreeMap<String, Vec<Share>>,
    /// What they need of each device at once.
    pub uses: Uses,
}

/// What a claim needs of each of its devices, with amounts in MiB and percent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need<'a> {
    /// How many devices.
    pub count: usize,
    /// MiB of each; 0 for whole devices.
    pub memory: u64,
    /// Percent of each.
    pub compute: Option<u64>,
    /// All of it.
    pub whole: bool,
    /// The MIG profile.
    pub profile: Option<&'a str>,
}

impl<'a> Need<'a> {
    pub fn of(claim: &'a Claim, unit: Unit) -> Self {
        let count = claim.count.max(1);
        let each = |amount: u64| amount.div_ceil(count as u64);
        match &claim.what {
            What::Share { memory, compute } => {
                let mib = match memory {
                    Memory::Mib(mib) => *mib,
                    Memory::Gpushare(units) if unit == Unit::Gib => units.saturating_mul(1024),
                    Memory::Gpushare(units) => *units,
                };
                Self { count, memory: each(mib), compute: compute.map(each), whole: false, profile: None }
            }
            What::Whole => Self { count, memory: 0, compute: None, whole: true, profile: None },
            What::Instance(profile) => Self { count, memory: 0, compute: None, whole: true, profile: Some(profile) },
        }
    }

    /// What it takes of a device.
    fn of_device(&self, device: &Device) -> Use {
        if self.whole {
            Use { memory: device.memory, compute: 0, whole: 1 }
        } else {
            Use { memory: self.memory, compute: self.compute.unwrap_or(0), whole: 0 }
        }
    }

    /// Whether a device is of the kind that it wants, full or not.
    pub fn is_kind(&self, device: &Device, models: &[String]) -> bool {
        device.profile.as_deref() == self.profile
            && (models.is_empty() || models.iter().any(|model| device.model.contains(model.as_str())))
    }

    /// Whether an empty device of that kind would do.
    pub fn fits_empty(&self, device: &Device) -> bool {
        self.memory <= device.memory
    }
}

/// Whether a device that is used so can take so much more.
pub(crate) fn fits(device: &Device, choosing: &Choosing, used: Use, more: Use) -> bool {
    let after = used.plus(more);
    if after.whole > 0 {
        // All of it: nobody else has a part. Overcommitted memory is no exception.
        return after.whole == 1 && (if more.whole == 1 { used.is_none() } else { more.is_none() });
    }
    after.memory <= choosing.overcommit.of(device.memory) && after.compute <= 100
}

/// A container's claim that has no devices yet.
struct Item<'a> {
    container: usize,
    need: Need<'a>,
}

/// What is tried for one node.
struct Search<'a> {
    devices: &'a [Device],
    choosing: Choosing,
    packing: Packing,
    models: &'a [String],
    request: &'a PodRequest,
    items: Vec<Item<'a>>,
    /// What the Pod needs of each device so far, of each of its containers.
    taken: Vec<Vec<Use>>,
    /// The devices of each item.
    chosen: Vec<Vec<usize>>,
    steps: u32,
}

/// Where a Pod's containers go on a node, or why they don't.
pub fn place(node: &NodeState, request: &PodRequest) -> Result<Placement, Refusal> {
    let devices = match &node.devices {
        Ok(devices) => devices,
        Err(why) => return Err(Refusal::never(&node.name, why)),
    };
    let choosing = node.choosing;
    let mut items: Vec<Item<'_>> = Vec::new();
    for (container, it) in request.containers.iter().enumerate() {
        items.extend(it.claims.iter().map(|claim| Item { container, need: Need::of(claim, choosing.unit) }));
    }
    // What is hardest to place comes first, but init containers last: they can take what the others have.
    items.sort_by_key(|item| {
        let need = &item.need;
        let init = request.containers[item.container].role == Role::Init;
        (init, Reverse((need.whole, need.count, need.memory)))
    });
    let mut search = Search {
        devices,
        choosing,
        packing: request.gpu_policy.unwrap_or(choosing.gpus),
        models: &request.models,
        request,
        chosen: vec![Vec::new(); items.len()],
        items,
        taken: vec![vec![Use::default(); devices.len()]; request.containers.len()],
        steps: 0,
    };
    if search.run(0) { Ok(search.placement()) } else { Err(reason::of(node, request)) }
}

impl Search<'_> {
    fn run(&mut self, number: usize) -> bool {
        let Some(item) = self.items.get(number) else { return true };
        let (container, need) = (item.container, item.need);
        for set in self.sets(container, &need) {
            self.steps += 1;
            if self.steps > MAX_STEPS {
                return false;
            }
            for &position in &set {
                let more = need.of_device(&self.devices[position]);
                self.taken[container][position] = self.taken[container][position].plus(more);
            }
            if self.run(number + 1) {
                self.chosen[number] = set;
                return true;
            }
            for &position in &set {
                self.taken[container][position] = Use::default();
            }
        }
        false
    }

    /// What the Pod needs of a device at once, as far as it is placed.
    fn needed(&self, position: usize) -> Use {
        peak(self.request, |container| self.taken[container][position])
    }

    /// Whether a container can have so much of a device, with all that the Pod has of it already.
    fn fits(&self, container: usize, position: usize, need: &Need<'_>) -> bool {
        let device = &self.devices[position];
        // A container has each device once.
        if !self.taken[container][position].is_none() || !device.healthy || !need.is_kind(device, self.models) {
            return false;
        }
        let more = need.of_device(device);
        let after = peak(self.request, |other| {
            let taken = self.taken[other][position];
            if other == container { taken.plus(more) } else { taken }
        });
        // The same for those of the Pod that run at a time with it: a whole device isn't shared within a Pod either.
        let together = self.together(container, position);
        need.fits_empty(device)
            && fits(device, &self.choosing, device.used, after)
            && fits(device, &self.choosing, together, more)
    }

    /// What those containers of the Pod have of a device that run at the same time as one of them.
    fn together(&self, container: usize, position: usize) -> Use {
        let containers = &self.request.containers;
        let at_once = |other: usize| match (containers[container].role, containers[other].role) {
            _ if other == container => false,
            (Role::Init, Role::Sidecar) => other < container,
            (Role::Sidecar, Role::Init) => other > container,
            (Role::Init, _) | (_, Role::Init) => false,
            _ => true,
        };
        (0..containers.len())
            .filter(|other| at_once(*other))
            .fold(Use::default(), |sum, other| sum.plus(self.taken[other][position]))
    }

    /// Sets of devices for one claim, the best first.
    fn sets(&self, container: usize, need: &Need<'_>) -> Vec<Vec<usize>> {
        let mut fitting: Vec<usize> =
            (0..self.devices.len()).filter(|&position| self.fits(container, position, need)).collect();
        if fitting.len() < need.count {
            return Vec::new();
        }
        let init = self.request.containers[container].role == Role::Init;
        fitting.sort_by(|&left, &right| {
            // An init container takes what the Pod has anyway.
            let had = |position: usize| init && !self.needed(position).is_none();
            had(right).cmp(&had(left)).then_with(|| self.better(need, left, right)).then(left.cmp(&right))
        });
        if need.count == 1 {
            return fitting.into_iter().map(|position| vec![position]).collect();
        }
        let linked = fitting.iter().any(|&position| !self.devices[position].links.is_empty());
        let mut sets: Vec<(u32, Vec<usize>)> = Vec::new();
        for start in 0..fitting.len().min(MAX_SETS) {
            let mut set = vec![fitting[start]];
            while set.len() < need.count {
                let rest = fitting.iter().copied().filter(|position| !set.contains(position));
                // max_by_key takes the last of equals, and the best comes first.
                let next = if linked {
                    rest.rev().max_by_key(|&position| self.links(&set, position))
                } else {
                    rest.min_by_key(|&position| {
                        let place = fitting.iter().position(|&it| it == position).unwrap_or(0);
                        (place + fitting.len() - start) % fitting.len()
                    })
                };
                let Some(next) = next else { return Vec::new() };
                set.push(next);
            }
            let links = (1..set.len()).map(|end| self.links(&set[..end], set[end])).sum();
            set.sort_unstable();
            if sets.iter().all(|(_, other)| *other != set) {
                sets.push((links, set));
            }
        }
        sets.sort_by_key(|(links, _)| Reverse(*links));
        sets.into_iter().map(|(_, set)| set).collect()
    }

    /// NVLinks between a device and those of a set.
    fn links(&self, set: &[usize], position: usize) -> u32 {
        set.iter().map(|&other| self.devices[other].links.get(position).copied().unwrap_or(0)).sum()
    }

    /// Which of two devices policy would rather take.
    fn better(&self, need: &Need<'_>, left: usize, right: usize) -> Ordering {
        let after = |position: usize| {
            let device = &self.devices[position];
            device.used.plus(self.needed(position)).plus(need.of_device(device))
        };
        let free = |position: usize| {
            self.choosing.overcommit.of(self.devices[position].memory).saturating_sub(after(position).memory)
        };
        match self.packing {
            Packing::Binpack => free(left).cmp(&free(right)),
            Packing::Spread => free(right).cmp(&free(left)),
            Packing::Balanced => {
                let unbalance = |position: usize| {
                    let memory = self.choosing.overcommit.of(self.devices[position].memory).max(1);
                    let after = after(position);
                    (after.memory.saturating_mul(1000) / memory).abs_diff(after.compute * 10)
                };
                unbalance(left).cmp(&unbalance(right)).then_with(|| free(left).cmp(&free(right)))
            }
        }
    }

    fn placement(&self) -> Placement {
        let mut containers: BTreeMap<String, Vec<Share>> = BTreeMap::new();
        for (item, set) in self.items.iter().zip(&self.chosen) {
            let shares = containers.entry(self.request.containers[item.container].name.clone()).or_default();
            shares.extend(set.iter().map(|&position| {
                let device = &self.devices[position];
                Share {
                    gpu: GpuReference::Uuid(device.uuid.to_string()),
                    memory_mib: if item.need.whole { device.memory } else { item.need.memory },
                    compute_percent: item.need.compute.and_then(|percent| u8::try_from(percent).ok()),
                }
            }));
        }
        let uses = (0..self.devices.len())
            .map(|position| (self.devices[position].uuid.clone(), self.needed(position)))
            .filter(|(_, used)| !used.is_none())
            .collect();
        Placement { containers, uses }
    }
}

/// What a Pod needs of one device at once: all that run to its end together, or an init container with the sidecars
/// before it, whichever is most. `of` is what each container has, by its position in the request.
fn peak(request: &PodRequest, of: impl Fn(usize) -> Use) -> Use {
    let (mut sidecars, mut apps, mut most) = (Use::default(), Use::default(), Use::default());
    for (position, container) in request.containers.iter().enumerate() {
        let used = of(position);
        match container.role {
            Role::Sidecar => sidecars = sidecars.plus(used),
            Role::Init => most = most.or(sidecars.plus(used)),
            Role::App => apps = apps.plus(used),
        }
    }
    most.or(sidecars.plus(apps))
}

/// What a Pod needs at once of each device that its grant names. Which containers have devices whole, and when they run,
/// is the Pod's own request's word.
pub fn uses(request: &PodRequest, shares: &BTreeMap<String, Vec<Share>>) -> Uses {
    let mut uuids: Vec<String> = shares.values().flatten().map(|share| share.gpu.to_string()).collect();
    uuids.sort_unstable();
    uuids.dedup();
    let named = |container: &str, uuid: &str| {
        shares
            .get(container)?
            .iter()
            .find(|share| share.gpu.to_string() == uuid)
            .map(|share| (share.memory_mib, share.compute_percent))
    };
    uuids
        .into_iter()
        .map(|uuid| {
            let used = peak(request, |position| {
                let container = &request.containers[position];
                let Some((memory, compute)) = named(&container.name, &uuid) else { return Use::default() };
                let is_instance = uuid.starts_with("MIG-");
                // A container that wants both shares and instances has its instances whole and its GPUs not.
                let whole = container.claims.iter().any(|claim| match claim.what {
                    What::Whole => !is_instance,
                    What::Instance(_) => is_instance,
                    What::Share { .. } => false,
                });
                Use { memory, compute: compute.map_or(0, u64::from), whole: u64::from(whole) }
            });
            (Arc::from(uuid), used)
        })
        .collect()
}

/// How good a node is with a Pod placed on it so, 0 to 10.
pub fn score(node: &NodeState, request: &PodRequest, placement: &Placement) -> i64 {
    let Ok(devices) = &node.devices else { return 0 };
    let (mut memory, mut capacity, mut compute) = (0_u64, 0_u64, 0_u64);
    for device in devices {
        let more =
            placement.uses.iter().find(|(uuid, _)| *uuid == device.uuid).map_or_else(Use::default, |(_, it)| *it);
        let used = device.used.plus(more);
        memory += used.memory;
        capacity += node.choosing.overcommit.of(device.memory);
        compute += if used.whole > 0 { 100 } else { used.compute };
    }
    let memory = memory.saturating_mul(1000) / capacity.max(1);
    let compute = compute.saturating_mul(10) / (devices.len() as u64).max(1);
    let full = match request.node_policy.unwrap_or(node.choosing.nodes) {
        Packing::Binpack => memory,
        Packing::Spread => 1000_u64.saturating_sub(memory),
        Packing::Balanced => 1000_u64.saturating_sub(memory.abs_diff(compute)),
    };
    i64::try_from(full.min(1000) / 100).unwrap_or(0)
}

#[cfg(test)]
pub(crate) mod tests {
    use gpufence_grant::inventory::{NodeGpu, NodeInventory, NodeMig};
    use proptest::prelude::*;

    use super::*;
    use crate::request::ContainerRequest;

    /// A node with GPUs of so many MiB.
    pub(crate) fn node(memories: &[u64]) -> NodeState {
        let gpu = |(index, memory): (usize, &u64)| NodeGpu {
            uuid: format!("GPU-{index:08}"),
            index: u32::try_from(index).unwrap(),
            model: "NVIDIA H200".into(),
            memory_mib: *memory,
            healthy: true,
            links: BTreeMap::new(),
            mig: Vec::new(),
        };
        let gpus = memories.iter().enumerate().map(gpu).collect();
        let mut node = NodeState::new("n".into());
        node.set_inventory(Ok(NodeInventory { version: 1, driver_version: "1.0".into(), gpus }));
        node
    }

    pub(crate) fn share(memory: u64, compute: Option<u64>) -> Claim {
        Claim { count: 1, what: What::Share { memory: Memory::Mib(memory), compute } }
    }

    fn whole(count: usize) -> Claim {
        Claim { count, what: What::Whole }
    }

    pub(crate) fn request(containers: &[(&str, Role, Claim)]) -> PodRequest {
        let container = |(name, role, claim): &(&str, Role, Claim)| ContainerRequest {
            name: (*name).into(),
            role: *role,
            claims: vec![claim.clone()],
        };
        PodRequest {
            containers: containers.iter().map(container).collect(),
            models: Vec::new(),
            gpu_policy: None,
            node_policy: None,
            mode: None,
        }
    }

    pub(crate) fn app(claim: Claim) -> PodRequest {
        request(&[("a", Role::App, claim)])
    }

    /// `container=GPU:MiB` of each share.
    fn told(placement: &Placement) -> Vec<String> {
        let of = |(name, shares): (&String, &Vec<Share>)| {
            let gpus = shares.iter().map(|share| {
                format!("{}:{}", share.gpu.to_string().trim_start_matches("GPU-0000000"), share.memory_mib)
            });
            format!("{name}={}", gpus.collect::<Vec<_>>().join("+"))
        };
        placement.containers.iter().map(of).collect()
    }

    fn placed(node: &NodeState, request: &PodRequest) -> Vec<String> {
        match place(node, request) {
            Ok(placement) => told(&placement),
            Err(refusal) => vec![refusal.why],
        }
    }

    fn take(node: &mut NodeState, uid: &str, request: &PodRequest) {
        let placement = place(node, request).unwrap();
        node.grant(uid.into(), placement.uses);
    }

    #[test]
    fn among_gpus() {
        let mut node = node(&[1000, 1000, 1000]);
        take(&mut node, "x", &app(share(600, Some(10))));
        for (packing, expected) in [(Packing::Binpack, "a=0:300"), (Packing::Spread, "a=1:300")] {
            let request = PodRequest { gpu_policy: Some(packing), ..app(share(300, None)) };
            assert_eq!(placed(&node, &request), [expected], "{packing}");
        }
        // 60 % of memory and 10 of compute are granted of GPU 0: 50 % of compute with little memory evens that out.
        let request = PodRequest { gpu_policy: Some(Packing::Balanced), ..app(share(10, Some(50))) };
        assert_eq!(placed(&node, &request), ["a=0:10"]);
        let request = PodRequest { gpu_policy: Some(Packing::Balanced), ..app(share(300, Some(30))) };
        assert_eq!(placed(&node, &request), ["a=1:300"]);
    }

    #[test]
    fn whole_gpus_and_several() {
        let mut node = node(&[1000, 1000, 1000, 1000]);
        take(&mut node, "x", &app(share(1, None)));
        assert_eq!(placed(&node, &app(whole(2))), ["a=1:1000+2:1000"]);
        assert_eq!(
            placed(&node, &app(whole(4))),
            ["n: wants 4 whole GPUs; GPU 0 has 1 MiB granted, GPU 1 is free, GPU 2 is free, GPU 3 is free"]
        );
        let of_two = Claim { count: 2, what: What::Share { memory: Memory::Mib(501), compute: Some(50) } };
        let placement = place(&node, &app(of_two)).unwrap();
        assert_eq!(told(&placement), ["a=0:251+1:251"]);
        assert_eq!(placement.containers["a"][0].compute_percent, Some(25));
        take(&mut node, "y", &app(whole(3)));
        let refusal = place(&node, &app(share(1000, None))).unwrap_err();
        assert_eq!(
            refusal.why,
            "n: wants 1000 MiB on one GPU; GPU 0 has 999 free, GPU 1 is given whole, GPU 2 is given whole, GPU 3 is given whole"
        );
        // Overcommitted memory isn't taken from who has a GPU whole.
        node.choosing.overcommit = "2".parse().unwrap();
        assert_eq!(placed(&node, &app(share(900, None))), ["a=0:900"]);
        assert_eq!(placed(&node, &app(whole(1))).len(), 1);
        assert!(place(&node, &app(whole(1))).unwrap_err().could_fit);
        // A share isn't larger than its GPU, whatever is overcommitted.
        assert!(!place(&node, &app(share(1001, None))).unwrap_err().could_fit);
    }

    #[test]
    fn neighbours_first() {
        let mut node = node(&[1000; 4]);
        let devices = node.devices.as_mut().unwrap();
        // 0 with 2, and 1 with 3, the latter by more.
        for (left, right, count) in [(0, 2, 2), (1, 3, 4)] {
            devices[left].links = vec![0; 4];
            devices[right].links = vec![0; 4];
            devices[left].links[right] = count;
            devices[right].links[left] = count;
        }
        assert_eq!(placed(&node, &app(whole(2))), ["a=1:1000+3:1000"]);
        take(&mut node, "x", &app(whole(2)));
        assert_eq!(placed(&node, &app(whole(2))), ["a=0:1000+2:1000"]);
    }

    #[test]
    fn containers_of_one_pod() {
        let node = node(&[1000, 1000]);
        let pod = |containers: &[(&str, Role, Claim)]| placed(&node, &request(containers));
        assert_eq!(
            pod(&[("a", Role::App, share(400, None)), ("b", Role::App, share(500, None))]),
            ["a=0:400", "b=0:500"]
        );
        // The larger first, else the second would find no room.
        assert_eq!(
            pod(&[
                ("a", Role::App, share(400, None)),
                ("b", Role::App, share(600, None)),
                ("c", Role::App, share(1000, None))
            ]),
            ["a=1:400", "b=1:600", "c=0:1000"]
        );
        // An init container uses what the others will have; a sidecar runs beside all.
        assert_eq!(
            pod(&[("i", Role::Init, share(900, None)), ("a", Role::App, share(1000, None))]),
            ["a=0:1000", "i=0:900"]
        );
        let with_sidecar = request(&[
            ("s", Role::Sidecar, share(300, None)),
            ("i", Role::Init, share(800, None)),
            ("a", Role::App, share(700, None)),
        ]);
        let placement = place(&node, &with_sidecar).unwrap();
        assert_eq!(told(&placement), ["a=0:700", "i=1:800", "s=0:300"]);
        assert_eq!(placement.uses.iter().map(|(_, used)| used.memory).collect::<Vec<_>>(), [1000, 800]);
        assert_eq!(uses(&with_sidecar, &placement.containers), placement.uses);
        // A container has each GPU once; a whole one isn't shared within a Pod.
        assert_eq!(pod(&[("a", Role::App, whole(1)), ("b", Role::App, share(1, None))]), ["a=0:1000", "b=1:1"]);
        assert_eq!(pod(&[("i", Role::Init, whole(2)), ("a", Role::App, share(1, None))]), ["a=0:1", "i=0:1000+1:1000"]);
        assert!(
            pod(&[("a", Role::App, whole(2)), ("b", Role::App, share(1, None))])[0]
                .contains("its containers together want 2 whole GPUs, and 1 MiB on one GPU")
        );
    }

    #[test]
    fn kinds() {
        let mut node = node(&[1000, 1000]);
        let devices = node.devices.as_mut().unwrap();
        devices[1].model = "nvidia-l4".into();
        devices[0].healthy = false;
        let of = |model: &str| PodRequest { models: vec![model.into()], ..app(share(1, None)) };
        assert_eq!(placed(&node, &of("l4")), ["a=1:1"]);
        let refusal = place(&node, &of("a100")).unwrap_err();
        assert_eq!(refusal.why, "n: wants 1 MiB on one GPU of model a100; it has 1 of nvidia-h200, 1 of nvidia-l4");
        assert!(!refusal.could_fit);
        assert_eq!(placed(&node, &of("h200")), ["n: wants 1 MiB on one GPU of model h200; GPU 0 is unhealthy"]);
        let mig = NodeMig { uuid: "MIG-00000001".into(), profile: "1g.10gb".into(), memory_mib: 100 };
        let gpu = NodeGpu {
            uuid: "GPU-00000000".into(),
            index: 0,
            model: "NVIDIA A100".into(),
            memory_mib: 800,
            healthy: true,
            links: BTreeMap::new(),
            mig: vec![mig],
        };
        node.set_inventory(Ok(NodeInventory { version: 1, driver_version: "1.0".into(), gpus: vec![gpu] }));
        let instance = |profile: &str| app(Claim { count: 1, what: What::Instance(profile.into()) });
        assert_eq!(placed(&node, &instance("1g.10gb")), ["a=MIG-00000001:100"]);
        assert_eq!(
            placed(&node, &instance("2g.20gb")),
            ["n: wants one MIG instance 2g.20gb; it has 1 of MIG 1g.10gb of nvidia-a100"]
        );
        assert_eq!(
            placed(&node, &app(share(1, None))),
            ["n: wants 1 MiB on one GPU; it has 1 of MIG 1g.10gb of nvidia-a100"]
        );
        take(&mut node, "x", &instance("1g.10gb"));
        assert!(place(&node, &instance("1g.10gb")).unwrap_err().could_fit);
    }

    #[test]
    fn the_reason_s_words() {
        let mut node = node(&[8192, 8192]);
        node.name = "gpu-node-1".into();
        take(&mut node, "x", &app(share(4096, Some(80))));
        let request = PodRequest { gpu_policy: Some(Packing::Spread), ..app(share(2048, None)) };
        take(&mut node, "y", &request);
        assert_eq!(
            placed(&node, &app(share(8192, None))),
            ["gpu-node-1: wants 8192 MiB on one GPU; GPU 0 has 4096 free, GPU 1 has 6144 free"]
        );
        assert_eq!(
            placed(&node, &app(share(6144, Some(101)))),
            [
                "gpu-node-1: wants 6144 MiB and 101 % of compute on one GPU; GPU 0 has 4096 and 20 % free, GPU 1 has 6144 and 100 % free"
            ]
        );
        node.devices = Err("it has no inventory".into());
        assert_eq!(placed(&node, &app(share(1, None))), ["gpu-node-1: it has no inventory"]);
    }

    #[test]
    fn units_of_the_node() {
        let mut node = node(&[8192]);
        let claim = Claim { count: 1, what: What::Share { memory: Memory::Gpushare(8), compute: None } };
        assert_eq!(placed(&node, &app(claim.clone())), ["a=0:8192"]);
        node.choosing.unit = Unit::Mib;
        assert_eq!(placed(&node, &app(claim)), ["a=0:8"]);
    }

    #[test]
    fn scores() {
        let mut node = node(&[1000, 1000]);
        take(&mut node, "x", &app(share(900, Some(90))));
        let scored = |node: &NodeState, policy, claim: Claim| {
            let request = PodRequest { node_policy: Some(policy), ..app(claim) };
            score(node, &request, &place(node, &request).unwrap())
        };
        assert_eq!(scored(&node, Packing::Binpack, share(100, None)), 5);
        assert_eq!(scored(&node, Packing::Spread, share(100, None)), 5);
        assert_eq!(scored(&node, Packing::Binpack, share(1000, None)), 9);
        assert_eq!(scored(&node, Packing::Balanced, share(1000, Some(100))), 10);
        assert_eq!(scored(&node, Packing::Balanced, share(1000, None)), 5);
    }

    fn any_request() -> impl Strategy<Value = PodRequest> {
        let role = prop_oneof![Just(Role::App), Just(Role::Sidecar), Just(Role::Init)];
        let claim = prop_oneof![
            (1..3_usize, 1..1500_u64, proptest::option::of(1..100_u64)).prop_map(|(count, memory, compute)| Claim {
                count,
                what: What::Share { memory: Memory::Mib(memory), compute }
            }),
            (1..3_usize).prop_map(whole),
        ];
        let packing = prop_oneof![Just(Packing::Binpack), Just(Packing::Spread), Just(Packing::Balanced)];
        (proptest::collection::vec((role, claim), 1..4), packing).prop_map(|(mut containers, packing)| {
            containers.sort_by_key(|(role, _)| *role == Role::App);
            let containers = containers.into_iter().enumerate().map(|(number, (role, claim))| ContainerRequest {
                name: format!("c{number}"),
                role,
                claims: vec![claim],
            });
            PodRequest { gpu_policy: Some(packing), containers: containers.collect(), ..app(whole(1)) }
        })
    }

    proptest! {
        /// Whatever comes and goes, no device is granted beyond what it has, a whole one is one Pod's, every container gets
        /// what it asked for, and the grant alone tells what the Pod needs.
        #[test]
        fn never_beyond_capacity(
            memories in proptest::collection::vec(500..1500_u64, 1..5),
            requests in proptest::collection::vec((any_request(), any::<bool>()), 1..20),
        ) {
            let mut node = node(&memories);
            let mut there = Vec::new();
            for (number, (request, leaves)) in requests.iter().enumerate() {
                if *leaves && !there.is_empty() {
                    let uid: String = there.remove(number % there.len());
                    prop_assert!(node.release(&uid));
                }
                if let Ok(placement) = place(&node, request) {
                    prop_assert_eq!(&uses(request, &placement.containers), &placement.uses);
                    for container in &request.containers {
                        let shares = &placement.containers[&container.name];
                        prop_assert_eq!(shares.len(), container.claims[0].count);
                        let need = Need::of(&container.claims[0], Unit::Gib);
                        prop_assert!(shares.iter().all(|share| need.whole || share.memory_mib == need.memory));
                    }
                    node.grant(number.to_string().into(), placement.uses);
                    there.push(number.to_string());
                }
                for device in node.devices.as_ref().unwrap() {
                    prop_assert!(device.used.memory <= device.memory, "{device:?}");
                    prop_assert!(device.used.compute <= 100 && device.used.whole <= 1, "{device:?}");
                    let users = node.pods().values().flatten().filter(|(uuid, _)| *uuid == device.uuid).count();
                    prop_assert!(device.used.whole == 0 || users == 1, "{device:?}");
                }
            }
        }
    }
}
