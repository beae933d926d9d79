// Kubernetes' own allocator of claims, as a program: lines of JSON in, a line of JSON for each.
//
// The first line has the node's ResourceSlices and the DeviceClasses. Each other line has what is allocated, and the
// claims of one pod; the answer has their allocations, null where they don't fit, or an error.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"

	core "k8s.io/api/core/v1"
	api "k8s.io/api/resource/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

type setup struct {
	Node    string               `json:"node"`
	Slices  []*api.ResourceSlice `json:"slices"`
	Classes classes              `json:"classes"`
}

type question struct {
	Allocated []api.DeviceRequestAllocationResult `json:"allocated"`
	Claims    []*api.ResourceClaim                `json:"claims"`
}

type answer struct {
	Allocations []api.AllocationResult `json:"allocations"`
	Error       string                 `json:"error,omitempty"`
}

type classes []*api.DeviceClass

func (all classes) List() ([]*api.DeviceClass, error) { return all, nil }

func (all classes) Get(name string) (*api.DeviceClass, error) {
	for _, class := range all {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, fmt.Errorf("no class %s", name)
}

// The gates that are on by default in Kubernetes 1.36 and 1.37.
var features = structured.Features{
	AdminAccess:            true,
	ConsumableCapacity:     true,
	DeviceBindingAndStatus: true,
	DeviceTaints:           true,
	PartitionableDevices:   true,
	PrioritizedList:        true,
}

func state(allocated []api.DeviceRequestAllocationResult) structured.AllocatedState {
	found := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, result := range allocated {
		device := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
		if result.ShareID == nil {
			found.AllocatedDevices.Insert(device)
			continue
		}
		found.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(device, (*types.UID)(result.ShareID)))
		found.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(device, result.ConsumedCapacity))
	}
	return found
}

func (from setup) answer(asked question, cache *cel.Cache) (given answer) {
	context := context.Background()
	allocator, err := structured.NewAllocator(context, features, state(asked.Allocated), from.Classes, from.Slices, cache)
	if err == nil {
		node := &core.Node{ObjectMeta: meta.ObjectMeta{Name: from.Node}}
		given.Allocations, err = allocator.Allocate(context, node, asked.Claims)
	}
	if err != nil {
		given.Error = err.Error()
	}
	return given
}

func main() {
	lines, answers := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	lines.Buffer(nil, 64<<20)
	var from *setup
	cache := cel.NewCache(100, cel.Features{EnableConsumableCapacity: true})
	for lines.Scan() {
		var err error
		if from == nil {
			from = &setup{}
			err = json.Unmarshal(lines.Bytes(), from)
		} else {
			var asked question
			if err = json.Unmarshal(lines.Bytes(), &asked); err == nil {
				err = answers.Encode(from.answer(asked, cache))
			}
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
