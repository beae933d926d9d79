package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25/mo"
	"github.com/vmware/govmomi/vim25/types"
)

// The host has one V100 with 16 GiB, which carries vGPUs of one size at a time.
const framebufferMiB = 16384

var capabilities = []types.HostSharedGpuCapabilities{
	{Vgpu: "grid_v100-4q", SuspendSupported: true, MigrateSupported: true, DiskSnapshotSupported: true},
	{Vgpu: "grid_v100-16q", SuspendSupported: true, MigrateSupported: true, MemorySnapshotSupported: true},
	{Vgpu: "grid_v100-4c", SuspendSupported: false},
}

// A command of the tests, of which only the named fields are set.
type command struct {
	Fault      *fault            `json:"fault"`      // adds a rule
	Delays     map[string]int    `json:"delays"`     // milliseconds before a method is served
	TaskDelays map[string]int    `json:"taskDelays"` // milliseconds that a task runs: Suspend, PowerOn, PowerOff, Reconfigure, Shutdown
	Set        map[string]string `json:"set"`        // a VM's power, connection or tools, as an admin or the guest changes it
	Name       string            `json:"name"`       // the VM of `set`
	Clear      bool              `json:"clear"`      // removes rules and delays
}

// A fault rule: of every `every` calls of a method, the first fails, `most` times at most.
type fault struct {
	Method string `json:"method"`
	Every  int    `json:"every"`
	Most   int    `json:"most"`
	Kind   string `json:"kind"`
}

type answer struct {
	Power map[string]string `json:"power"`
	Calls []string          `json:"calls"` // what was begun with VMs, in order
}

type kept struct {
	Power string `json:"power"`
	Vgpu  string `json:"vgpu"`
}

type lab struct {
	mutex   sync.Mutex
	model   *simulator.Model
	vms     []*simulator.VirtualMachine
	context *simulator.Context
	path    string
	calls   []string
	delays  map[string]int
	seen    map[*fault]int

	shutdown time.Duration // how long a guest takes to end
}

func newLab(model *simulator.Model, path string) *lab {
	l := &lab{model: model, context: model.Service.Context, path: path, seen: map[*fault]int{}}
	for _, entity := range model.Map().All("HostSystem") {
		host := entity.(*simulator.HostSystem)
		host.Config.SharedGpuCapabilities = capabilities
		for _, capability := range capabilities {
			host.Config.SharedPassthruGpuTypes = append(host.Config.SharedPassthruGpuTypes, capability.Vgpu)
		}
	}
	before := map[string]kept{}
	if text, err := os.ReadFile(path); err == nil {
		if err := json.Unmarshal(text, &before); err != nil {
			log.Fatal(err)
		}
	}
	for _, entity := range model.Map().All("VirtualMachine") {
		l.vms = append(l.vms, entity.(*simulator.VirtualMachine))
	}
	sort.Slice(l.vms, func(a, b int) bool { return l.vms[a].Name < l.vms[b].Name })
	for number, vm := range l.vms {
		l.prepare(vm, number, before)
		model.Map().Put(&worker{vm, l})
	}
	l.save()
	l.delayTasks(nil)
	return l
}

// The registry's lock of a VM is free while its task is delayed, so that it can be read, as at a vCenter.
func (l *lab) delayTasks(delays map[string]int) {
	all := map[string]int{"LockHandoff": 0}
	for name, delay := range delays {
		all[name] = delay
	}
	simulator.TaskDelay.MethodDelay = all
	l.shutdown = time.Duration(delays["Shutdown"]) * time.Millisecond
}

// The last worker has a vGPU of the whole GPU and is suspended, the other ones have a quarter each and run.
func (l *lab) prepare(vm *simulator.VirtualMachine, number int, before map[string]kept) {
	name := fmt.Sprintf("worker%d", number)
	start := kept{Power: string(types.VirtualMachinePowerStatePoweredOn), Vgpu: "grid_v100-4q"}
	if number == len(l.vms)-1 {
		start = kept{Power: string(types.VirtualMachinePowerStateSuspended), Vgpu: "grid_v100-16q"}
	}
	if last, ok := before[name]; ok {
		start = last
	}
	vm.Name, vm.Config.Name, vm.Summary.Config.Name = name, name, name
	vm.Config.Uuid = fmt.Sprintf("4217AAAA-0000-0000-0000-%012d", number)
	vm.Config.InstanceUuid = fmt.Sprintf("5017bbbb-0000-0000-0000-%012d", number)
	vm.Summary.Config.Uuid, vm.Summary.Config.InstanceUuid = vm.Config.Uuid, vm.Config.InstanceUuid
	device := &types.VirtualPCIPassthrough{}
	device.Key = 13000
	device.Backing = &types.VirtualPCIPassthroughVmiopBackingInfo{Vgpu: start.Vgpu}
	vm.Config.Hardware.Device = append(vm.Config.Hardware.Device, device)
	l.model.Map().Update(l.context, vm, powered(types.VirtualMachinePowerState(start.Power)))
}

func powered(state types.VirtualMachinePowerState) []types.PropertyChange {
	tools := types.VirtualMachineToolsRunningStatusGuestToolsNotRunning
	if state == types.VirtualMachinePowerStatePoweredOn {
		tools = types.VirtualMachineToolsRunningStatusGuestToolsRunning
	}
	return []types.PropertyChange{
		{Name: "runtime.powerState", Val: state},
		{Name: "summary.runtime.powerState", Val: state},
		{Name: "guest.toolsRunningStatus", Val: string(tools)},
	}
}

// Delays a method before it is served; the simulator's own delays can't be changed while it serves.
func (l *lab) delay(_ *simulator.Context, method *simulator.Method) (mo.Reference, types.BaseMethodFault) {
	l.mutex.Lock()
	delay := l.delays[method.Name]
	l.mutex.Unlock()
	time.Sleep(time.Duration(delay) * time.Millisecond)
	return nil, nil
}

func (l *lab) obey(order command) answer {
	for _, vm := range l.vms {
		if vm.Name == order.Name {
			l.set(vm, order.Set) // without the mutex: a task takes it while it has the VM's lock
		}
	}
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if order.Clear {
		l.delays = nil
		l.delayTasks(nil)
		l.model.Service.ClearFaultRules()
	}
	if order.Delays != nil {
		l.delays = order.Delays
	}
	if order.TaskDelays != nil {
		l.delayTasks(order.TaskDelays)
	}
	if order.Fault != nil {
		l.model.Service.AddFaultRule(l.rule(order.Fault))
	}
	l.saveLocked()
	power := map[string]string{}
	for _, vm := range l.vms {
		power[vm.Name] = string(vm.Runtime.PowerState)
	}
	return answer{power, append([]string{}, l.calls...)}
}

func (l *lab) set(vm *simulator.VirtualMachine, values map[string]string) {
	var changes []types.PropertyChange
	if power, ok := values["power"]; ok {
		changes = append(changes, powered(types.VirtualMachinePowerState(power))...)
	}
	if connection, ok := values["connection"]; ok {
		state := types.VirtualMachineConnectionState(connection)
		changes = append(changes, types.PropertyChange{Name: "runtime.connectionState", Val: state})
	}
	if tools, ok := values["tools"]; ok {
		changes = append(changes, types.PropertyChange{Name: "guest.toolsRunningStatus", Val: tools})
	}
	l.change(vm, changes)
}

// Changes a VM for somebody who is no client: with a context of its own, since that owns the VM's lock.
func (l *lab) change(vm *simulator.VirtualMachine, changes []types.PropertyChange) {
	own := *l.context
	l.model.Map().AtomicUpdate(&own, vm, changes)
}

func (l *lab) rule(wanted *fault) *simulator.FaultInjectionRule {
	kinds := map[string]simulator.FaultType{
		"system":           simulator.FaultTypeCustom, // the generic one is of a type that no vCenter sends
		"notAuthenticated": simulator.FaultTypeNotAuthenticated,
		"noPermission":     simulator.FaultTypeNoPermission,
	}
	kind, ok := kinds[wanted.Kind]
	if !ok {
		log.Fatalf("no kind of fault: %s", wanted.Kind)
	}
	return &simulator.FaultInjectionRule{
		MethodName: wanted.Method, ObjectType: "*", ObjectName: "*", Probability: 1, Enabled: true,
		FaultType: kind, Fault: &types.SystemError{Reason: "injected"}, MaxCount: wanted.Most,
		InclusionPropertyFilter: func(mo.Reference) bool {
			l.seen[wanted]++
			return (l.seen[wanted]-1)%wanted.Every == 0
		},
	}
}

func (l *lab) save() {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.saveLocked()
}

func (l *lab) saveLocked() {
	states := map[string]kept{}
	for _, vm := range l.vms {
		states[vm.Name] = kept{string(vm.Runtime.PowerState), strings.Join(vgpus(vm), ",")}
	}
	text, err := json.Marshal(states)
	if err != nil {
		log.Fatal(err)
	}
	beside := l.path + ".new"
	if err := os.WriteFile(beside, text, 0o600); err != nil {
		log.Fatal(err)
	}
	if err := os.Rename(beside, l.path); err != nil {
		log.Fatal(err)
	}
}
