package main

import (
	"strconv"
	"strings"
	"time"

	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25/methods"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"
)

const (
	on        = types.VirtualMachinePowerStatePoweredOn
	off       = types.VirtualMachinePowerStatePoweredOff
	suspended = types.VirtualMachinePowerStateSuspended
)

// A VM whose vGPUs need a GPU while it is on, and that refuses what a vCenter refuses.
type worker struct {
	*simulator.VirtualMachine
	lab *lab
}

func vgpus(vm *simulator.VirtualMachine) []string {
	var found []string
	for _, device := range vm.Config.Hardware.Device {
		if backing, ok := device.GetVirtualDevice().Backing.(*types.VirtualPCIPassthroughVmiopBackingInfo); ok {
			found = append(found, backing.Vgpu)
		}
	}
	return found
}

// The framebuffer of a type, by the number in its name: 4 GiB of grid_v100-4q.
func mib(vgpu string) int {
	words := strings.Split(vgpu, "-")
	gib, err := strconv.Atoi(strings.TrimRight(words[len(words)-1], "qc"))
	if err != nil {
		return framebufferMiB + 1
	}
	return gib * 1024
}

func (w *worker) used() int {
	sum := 0
	for _, vm := range w.lab.vms {
		if vm.Runtime.PowerState == on || vm == w.VirtualMachine {
			for _, vgpu := range vgpus(vm) {
				sum += mib(vgpu)
			}
		}
	}
	return sum
}

func (w *worker) begin(what string) {
	w.lab.mutex.Lock()
	defer w.lab.mutex.Unlock()
	w.lab.calls = append(w.lab.calls, what+" "+w.Name)
}

// Runs a task, which reads and changes the VM when its delay has passed; until then the VM can be read.
func (w *worker) task(ctx *simulator.Context, what string, run func() types.BaseMethodFault) types.ManagedObjectReference {
	w.begin(what)
	task := simulator.CreateTask(w.VirtualMachine, what, func(*simulator.Task) (types.AnyType, types.BaseMethodFault) {
		w.lab.mutex.Lock()
		defer w.lab.mutex.Unlock()
		fault := run()
		w.lab.saveLocked()
		return nil, fault
	})
	return task.Run(ctx)
}

func (w *worker) power(ctx *simulator.Context, wanted types.VirtualMachinePowerState) types.BaseMethodFault {
	existing := w.Runtime.PowerState
	if existing == wanted || wanted == suspended && existing != on {
		return &types.InvalidPowerState{RequestedState: wanted, ExistingState: existing}
	}
	if wanted == on && w.used() > framebufferMiB {
		return &types.InsufficientGraphicsResourcesFault{}
	}
	ctx.Update(w.VirtualMachine, powered(wanted))
	return nil
}

func (w *worker) PowerOnVMTask(ctx *simulator.Context, _ *types.PowerOnVM_Task) soap.HasFault {
	task := w.task(ctx, "PowerOn", func() types.BaseMethodFault { return w.power(ctx, on) })
	return &methods.PowerOnVM_TaskBody{Res: &types.PowerOnVM_TaskResponse{Returnval: task}}
}

func (w *worker) PowerOffVMTask(ctx *simulator.Context, _ *types.PowerOffVM_Task) soap.HasFault {
	task := w.task(ctx, "PowerOff", func() types.BaseMethodFault { return w.power(ctx, off) })
	return &methods.PowerOffVM_TaskBody{Res: &types.PowerOffVM_TaskResponse{Returnval: task}}
}

func (w *worker) SuspendVMTask(ctx *simulator.Context, _ *types.SuspendVM_Task) soap.HasFault {
	task := w.task(ctx, "Suspend", func() types.BaseMethodFault { return w.power(ctx, suspended) })
	return &methods.SuspendVM_TaskBody{Res: &types.SuspendVM_TaskResponse{Returnval: task}}
}

// The guest ends by itself: no task shows it, and the VM is on until then.
func (w *worker) ShutdownGuest(_ *simulator.Context, _ *types.ShutdownGuest) soap.HasFault {
	body := &methods.ShutdownGuestBody{}
	if w.Runtime.PowerState != on {
		fault := &types.InvalidPowerState{RequestedState: on, ExistingState: w.Runtime.PowerState}
		body.Fault_ = simulator.Fault("", fault)
		return body
	}
	if w.Guest.ToolsRunningStatus != string(types.VirtualMachineToolsRunningStatusGuestToolsRunning) {
		body.Fault_ = simulator.Fault("", &types.ToolsUnavailable{})
		return body
	}
	w.begin("Shutdown")
	go func() {
		time.Sleep(w.lab.shutdown)
		w.lab.change(w.VirtualMachine, powered(off))
		w.lab.save()
	}()
	body.Res = &types.ShutdownGuestResponse{}
	return body
}

func (w *worker) ReconfigVMTask(ctx *simulator.Context, request *types.ReconfigVM_Task) soap.HasFault {
	task := w.task(ctx, "Reconfigure", func() types.BaseMethodFault {
		if w.Runtime.PowerState != off {
			return &types.InvalidPowerState{RequestedState: off, ExistingState: w.Runtime.PowerState}
		}
		return w.reconfigure(ctx, request.Spec.DeviceChange)
	})
	return &methods.ReconfigVM_TaskBody{Res: &types.ReconfigVM_TaskResponse{Returnval: task}}
}

// Changes the backing of vGPU devices that the VM has; refuses all other changes, and types that the host lacks.
func (w *worker) reconfigure(ctx *simulator.Context, changes []types.BaseVirtualDeviceConfigSpec) types.BaseMethodFault {
	devices := append([]types.BaseVirtualDevice{}, w.Config.Hardware.Device...)
	for number, change := range changes {
		spec := change.GetVirtualDeviceConfigSpec()
		backing, ok := spec.Device.GetVirtualDevice().Backing.(*types.VirtualPCIPassthroughVmiopBackingInfo)
		if !ok || spec.Operation != types.VirtualDeviceConfigSpecOperationEdit || !offered(backing.Vgpu) {
			return &types.InvalidDeviceBacking{InvalidDeviceSpec: types.InvalidDeviceSpec{DeviceIndex: int32(number)}}
		}
		for place, device := range devices {
			if device.GetVirtualDevice().Key == spec.Device.GetVirtualDevice().Key {
				devices[place] = spec.Device
			}
		}
	}
	ctx.Update(w.VirtualMachine, []types.PropertyChange{
		{Name: "config.hardware.device", Val: devices},
		{Name: "config.changeVersion", Val: time.Now().UTC().Format(time.RFC3339Nano)},
	})
	return nil
}

func offered(vgpu string) bool {
	for _, capability := range capabilities {
		if capability.Vgpu == vgpu {
			return true
		}
	}
	return false
}
