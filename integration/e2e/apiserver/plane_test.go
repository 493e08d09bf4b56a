// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"

	"github.com/podlace/podlace/integration/kerneltest"
)

// apiAddress is the address of the API server. The router has this address on the link of the first two nodes.
const apiAddress = "172.31.255.254"

// agentAccount is the ServiceAccount of the shipped manifest.
const agentAccount = "system:serviceaccount:podlace:podlace-node"

// controlPlane is an API server with its etcd, in the tests' network namespace.
type controlPlane struct {
	*testing.T
	dir   string
	flags []string // of the API server
	api   *testProcess
	admin *rest.RESTClient
	token string // of the account
}

// newPlane starts etcd and the API server and grants the rights of the shipped manifest.
func newPlane(t *testing.T, flags ...string) *controlPlane {
	t.Helper()
	p := &controlPlane{T: t, dir: t.TempDir(), flags: flags}
	const etcd, peers = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
	p.run("etcd", "--name=podlace", "--data-dir="+p.dir+"/data", "--unsafe-no-fsync", "--log-level=warn", "--listen-client-urls="+etcd,
		"--advertise-client-urls="+etcd, "--listen-peer-urls="+peers, "--initial-advertise-peer-urls="+peers, "--initial-cluster=podlace="+peers)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	kerneltest.Must(t, err)
	der, err := x509.MarshalECPrivateKey(key)
	kerneltest.Must(t, err)
	p.write("sa.key", string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})))
	p.write("tokens.csv", rand.Text()+",admin,admin,system:masters\n")
	p.write("audit.yaml", `{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [
		{"level": "Metadata", "users": ["`+agentAccount+`"]}, {"level": "None"}]}`)
	began := time.Now()
	p.startAPI()
	p.admin = p.clientFor(strings.Split(p.read("tokens.csv"), ",")[0])
	p.awaitReady()
	t.Logf("etcd and the API server answer after %.1f s, load %s", time.Since(began).Seconds(), loadAverages())
	p.applyRights()
	return p
}

func (p *controlPlane) write(name, text string) {
	p.Helper()
	kerneltest.Must(p, os.WriteFile(filepath.Join(p.dir, name), []byte(text), 0o600))
}

func (p *controlPlane) read(name string) string {
	p.Helper()
	text, err := os.ReadFile(filepath.Join(p.dir, name))
	kerneltest.Must(p, err)
	return string(text)
}

func (p *controlPlane) run(program string, args ...string) *testProcess {
	p.Helper()
	return startProcess(p.T, filepath.Join(p.dir, program+".log"), exec.Command(filepath.Join(os.Getenv("KUBERNETES"), program), args...))
}

// startAPI starts the API server, which creates its own certificate.
func (p *controlPlane) startAPI() {
	p.Helper()
	p.api = p.run("kube-apiserver", append([]string{"--etcd-servers=http://127.0.0.1:2379", "--bind-address=::", "--secure-port=6443",
		"--advertise-address=" + apiAddress, "--cert-dir=" + p.dir + "/cert", "--token-auth-file=" + p.dir + "/tokens.csv",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + p.dir + "/sa.key",
		"--service-account-signing-key-file=" + p.dir + "/sa.key", "--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC",
		"--endpoint-reconciler-type=none", "--audit-log-path=" + p.dir + "/audit.log", "--audit-policy-file=" + p.dir + "/audit.yaml"},
		p.flags...)...)
}

func (p *controlPlane) ca() string { return p.dir + "/cert/apiserver.crt" }

func (p *controlPlane) awaitReady() {
	p.Helper()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		err := p.admin.Get().AbsPath("/readyz").Do(context.Background()).Error()
		if err == nil {
			return
		}
		if time.Now().After(end) || !p.api.isAlive() {
			p.Fatalf("the API server is not ready: %v", err)
		}
	}
}

// killAPI kills the API server, waits for the given time, and starts it again.
func (p *controlPlane) killAPI(away time.Duration) {
	p.Helper()
	p.api.signalWait(syscall.SIGKILL)
	time.Sleep(away)
	p.startAPI()
	p.awaitReady()
}

// clientFor returns a client with the given token.
func (p *controlPlane) clientFor(token string) *rest.RESTClient {
	p.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) { // the API server writes its certificate after its start
		if _, err := os.Stat(p.ca()); err == nil || time.Now().After(end) {
			break
		}
	}
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, corev1.SchemeGroupVersion)
	scheme.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Node{}, &corev1.NodeList{})
	group := corev1.SchemeGroupVersion
	c, err := rest.RESTClientFor(&rest.Config{Host: "https://" + apiAddress + ":6443", BearerToken: token, APIPath: "/api", QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAFile: p.ca()},
		ContentConfig: rest.ContentConfig{GroupVersion: &group, ContentType: runtime.ContentTypeProtobuf,
			NegotiatedSerializer: serializer.NewCodecFactory(scheme).WithoutConversion()}})
	kerneltest.Must(p, err)
	return c
}

// applyRights creates the shipped manifest's ServiceAccount, roles and role bindings, and requests a token.
func (p *controlPlane) applyRights() {
	p.Helper()
	text, err := os.ReadFile("../../../conf/cluster/base/rights.yaml")
	kerneltest.Must(p, err)
	paths := map[string]string{"Namespace": "/api/v1/namespaces", "ServiceAccount": "/api/v1/namespaces/podlace/serviceaccounts",
		"ClusterRole":        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
		"ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"}
	for objects := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096); ; {
		var object unstructured.Unstructured
		err := objects.Decode(&object.Object)
		if errors.Is(err, io.EOF) {
			break
		}
		kerneltest.Must(p, err)
		_, err = p.post(paths[object.GetKind()], object.Object)
		kerneltest.Must(p, err)
	}
	answer, err := p.post(paths["ServiceAccount"]+"/podlace-node/token", map[string]any{"apiVersion": "authentication.k8s.io/v1",
		"kind": "TokenRequest", "spec": map[string]any{"expirationSeconds": 86400}})
	kerneltest.Must(p, err)
	var request struct{ Status struct{ Token string } }
	kerneltest.Must(p, json.Unmarshal(answer, &request))
	p.token = request.Status.Token
}

func (p *controlPlane) post(path string, object any) ([]byte, error) {
	body, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	answer, err := p.admin.Post().AbsPath(path).SetHeader("Content-Type", "application/json").SetHeader("Accept", "application/json").
		Body(body).Do(context.Background()).Raw()
	if err != nil {
		err = fmt.Errorf("POST %s: %w", path, err)
	}
	return answer, err
}

type auditRequest struct {
	Verb       string
	RequestURI string
	UserAgent  string
	ObjectRef  struct{ Resource string }
	Response   struct{ Code int } `json:"responseStatus"`
}

// auditRequests returns the requests with the token of the agents' ServiceAccount.
func (p *controlPlane) auditRequests() (list []auditRequest) {
	p.Helper()
	for line := range strings.Lines(p.read("audit.log")) {
		var r auditRequest
		kerneltest.Must(p, json.Unmarshal([]byte(line), &r))
		list = append(list, r)
	}
	return list
}
